"""A catalogue of misuses: each is refused in words that help, and changes nothing.

Names of the entries say what is wrong; the words are the rule, the value and the cure. What other
files test is not repeated: texts of ``torch.optim`` (``test_torch_optimizer_contract``), shapes
that formats take (``tests/tensors``), what may be damaged of checkpoints (``test_hostile_import``),
arguments of ZeRO (``test_zero``).
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from fp4adam import (
    FP4Adam,
    FusedAdam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Recipe,
    TensorAdapter,
    export_checkpoint,
    export_masters,
    hf_scale_groups,
    import_checkpoint,
    quantize_model,
    register_adapter,
    use_plain_state_dict,
)
from fp4adam.fp8_utils import quantize_master_weights

NAN = math.nan
FP8_MATMULS = Recipe("float8block", activations=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)
        self.late = nn.Linear(64, 64, bias=False)
        self.head = nn.Linear(64, 10)


class Scene:
    """A quantized model that has been trained but for one layer, and one in high precision."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.model, self.plain = quantize_model(Net(), "nvfp4"), Net()
        self.weight, self.late = self.model.up.weight, self.model.late.weight
        trained = [item for item in self.model.named_parameters() if item[1] is not self.late]
        self.optimizer = FP4Adam(trained, use_decoupled_grad=True)
        for _, param in trained:
            param.decoupled_grad = torch.ones(param.shape)
        self.optimizer.step()

    def contents(self) -> dict[str, Any]:
        """All bytes of parameters, states and files, and which objects the parameters are."""
        found: dict[str, Any] = {}
        for model in (self.model, self.plain):
            for name, param in model.named_parameters():
                tensors = dict(self.optimizer.__dict__["state"].get(param, {}))
                if isinstance(param, QuantizedTensor):
                    tensors |= param.storage_tensors()
                    tensors["init"] = param._high_precision_init_val
                elif not isinstance(param, nn.UninitializedParameter):
                    tensors["value"] = param.detach()
                found[f"{id(model)} {name}"] = id(param), type(param)
                found |= {f"{id(param)} {key}": bytes_of(t) for key, t in tensors.items()}
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return found | {str(path): path.read_bytes() for path in files}


def bytes_of(tensor: Tensor | None) -> bytes | None:
    if tensor is None or tensor.is_meta:
        return None
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# A misuse prepares a scene and returns the call that is to be refused.
Misuse = Callable[[Scene], Callable[[], object]]


def call(function: Callable[[Scene], object]) -> Misuse:
    return lambda scene: partial(function, scene)


def new(**options: Any) -> Misuse:
    return call(lambda s: FP4Adam(s.model.named_parameters(), **options))


def of(make: Callable[[Scene], Any]) -> Misuse:
    return call(lambda s: FP4Adam(make(s)))


def with_grad(make: Callable[[Tensor], object]) -> Misuse:
    def prepare(scene: Scene) -> Callable[[], object]:
        scene.model.down.weight.decoupled_grad = make(scene.weight.decoupled_grad)
        return scene.optimizer.step

    return prepare


def with_param(make: Callable[[Scene], Tensor], dtype: torch.dtype = torch.float32) -> Misuse:
    """A step with another parameter and its gradient."""

    def prepare(scene: Scene) -> Callable[[], object]:
        param = nn.Parameter(make(scene), requires_grad=False)
        param.decoupled_grad = torch.ones(param.shape, device=param.device).to(dtype)
        scene.optimizer.add_param_group({"params": [("another", param)]})
        return scene.optimizer.step

    return prepare


def with_group(**options: Any) -> Misuse:
    def prepare(scene: Scene) -> Callable[[], object]:
        scene.optimizer.param_groups[0].update(options)
        return scene.optimizer.step

    return prepare


def loading(edit: Callable[[dict[str, Any]], object]) -> Misuse:
    def prepare(scene: Scene) -> Callable[[], object]:
        saved = copy.deepcopy(scene.optimizer.state_dict())
        edit(saved)
        return partial(scene.optimizer.load_state_dict, saved)

    return prepare


def loading_compact(edit: Callable[[dict[str, Any]], object]) -> Misuse:
    """The state of a BF16 parameter with a remainder, in 8 bits."""

    def prepare(scene: Scene) -> Callable[[], object]:
        param = nn.Parameter(torch.ones(40, 3, dtype=torch.bfloat16))
        param.grad = torch.ones_like(param)
        optimizer = FusedAdam([param], states="8bit")
        optimizer.step()
        saved = copy.deepcopy(optimizer.compact_state_dict())
        edit(saved["state"][0])
        return partial(optimizer.load_state_dict, saved)

    return prepare


def cut(name: str) -> Misuse:
    return loading_compact(lambda state: state.update({name: state[name][1:]}))


def cast(name: str, dtype: torch.dtype) -> Misuse:
    return loading_compact(lambda state: state.update({name: state[name].to(dtype)}))


def loading_state(name: str, value: object) -> Misuse:
    return loading(lambda saved: saved["state"][0].update({name: value}))


def loading_group(**options: Any) -> Misuse:
    return loading(lambda saved: saved["param_groups"][0].update(options))


def quantizing(change: Callable[[Net], object] = id, recipe: Any = "nvfp4", **kw: Any) -> Misuse:
    def prepare(scene: Scene) -> Callable[[], object]:
        change(scene.plain)
        return partial(quantize_model, scene.plain, recipe, **kw)

    return prepare


def importing(change: Callable[[Net], object] = id, quantizer: Any = None) -> Misuse:
    def prepare(scene: Scene) -> Callable[[], object]:
        export_checkpoint(scene.model, scene.folder)
        change(scene.plain)
        return partial(import_checkpoint, scene.plain, scene.folder, quantizer)

    return prepare


def damaged(damage: Callable[[Path], object]) -> Misuse:
    def prepare(scene: Scene) -> Callable[[], object]:
        export_checkpoint(scene.model, scene.folder)
        damage(scene.folder)
        return partial(import_checkpoint, scene.plain, scene.folder)

    return prepare


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Misuse:
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        stored = load_file(path)
        change(stored)
        save_file({name: t.contiguous() for name, t in stored.items()}, path, {"format": "pt"})

    return damaged(edit)


def without(name: str) -> Misuse:
    return tensors(lambda stored: stored.pop(name))


def replacing(name: str, change: Callable[[Tensor], Tensor]) -> Misuse:
    return tensors(lambda stored: stored.update({name: change(stored[name])}))


def removing(file: str) -> Misuse:
    return damaged(lambda folder: (folder / file).unlink())


def overlapping(scene: Scene) -> Callable[[], object]:
    whole = NVFP4Quantizer().quantize(torch.ones(64, 64))
    params = [nn.Parameter(whole), nn.Parameter(whole.detach()[32:])]
    params[0].grad = torch.ones(64, 64)
    return FP4Adam(params).step


def slice_in_a_group(scene: Scene) -> Callable[[], object]:
    params = [nn.Parameter(scene.weight.detach()[:32]), scene.model.down.weight]
    FP4Adam([scene.weight, params[1]], scale_groups=[[scene.weight, params[1]]])
    params[1].grad = torch.ones(64, 96)
    return FP4Adam(params).step


def in_inference_mode(scene: Scene) -> Callable[[], object]:
    return torch.inference_mode()(scene.optimizer.step)


@torch.inference_mode()
def inference_weight(scene: Scene) -> list[Tensor]:
    scene.late._rowwise_data = scene.late._rowwise_data.clone()  # and the rest is not
    return [scene.late]


@torch.inference_mode()
def inference_vector(scene: Scene) -> list[Tensor]:
    return [torch.ones(3)]


def assigning(scene: Scene) -> Callable[[], object]:
    state, model = scene.model.state_dict(), use_plain_state_dict(scene.model)
    model.load_state_dict(state, assign=True)  # of quantized weights
    state = model.state_dict() | {"up.weight": state["up.weight"]}
    return partial(model.load_state_dict, state, assign=True)


def with_text(scene: Scene) -> Callable[[], object]:
    scene.model.__class__ = type("Own", (Net,), {"get_extra_state": lambda self: "text"})
    return partial(export_checkpoint, scene.model, scene.folder)


def scattering(*values: object) -> Misuse:
    """``quantize_master_weights`` of one weight, with the arguments after it."""
    return call(lambda s: quantize_master_weights([s.late], *values, None))


def in_layer(*shape: int) -> Misuse:
    """A layer [96, 64] whose matmuls are quantized."""
    weight = Recipe("nvfp4", activations=True).quantizer.quantize(torch.ones(96, 64))
    return call(lambda s: nn.functional.linear(torch.ones(shape), weight))


E4M3 = torch.float8_e4m3fn
# The types of exceptions, short enough for a table.
V, T, R, N, F = ValueError, TypeError, RuntimeError, NotImplementedError, FileNotFoundError
AT_LEAST_0, NUMBER = "it must be a number >= 0", "it must be a number, or a one-element tensor"
DENSE = "x must be a dense tensor"
FACTORED = "factored second moments must come with decoupled_weight_decay, int8 masters or none"

# Name: the misuse, the type of the exception, and what its text has to contain.
MISUSES: dict[str, tuple[Misuse, type[BaseException], tuple[str, ...]]] = {
    # The constructor
    "lr: NaN": (new(lr=NAN), V, ("Invalid learning rate: nan", AT_LEAST_0)),
    "lr: text": (new(lr="1e-3"), T, ("Invalid learning rate: '1e-3'", NUMBER)),
    "two names of one flag": (new(adam_w_mode=True, decoupled_weight_decay=False), V, (
        "must be equal", "got True and False")),
    "masters of a group": (call(lambda s: s.optimizer.add_param_group(
        {"params": [s.late], "exp_avg_dtype": None, "master_weights": False})), V, (
        "master_weights must be an option",)),
    "a flag of Transformer Engine": (call(
        lambda s: s.optimizer.param_groups[0].update(adam_w_mode=False) or s.optimizer.step()), V, (
        "got adam_w_mode", 'group["decoupled_weight_decay"]')),
    "betas: one number": (new(betas=0.9), T, ("betas must be two", "got 0.9", "(0.9, 0.999)")),
    "capturable": (new(capturable=True), N, ("capturable must be False", "outside the graph")),
    "differentiable": (new(differentiable=True), N, ("differentiable must be False", "in-place",
        "torch.optim.AdamW")),
    "masters in bfloat16": (new(master_weight_dtype=torch.bfloat16), V, ("must be one of float32, "
        "float16", "got torch.bfloat16")),
    "quantize_from": (new(quantize_from="x"), V, ("master, param_dtype", "got 'x'", "'master' ")),
    "first moments: factored": (new(exp_avg_dtype="factored"), V, ("must be one", "got factored")),
    "factored: FusedAdam": (call(lambda s: FusedAdam([s.late], states="factored")), N, (FACTORED,
        "FusedAdam with as_te=True", "pass states='factored' to FP4Adam")),
    "factored: a flag of Transformer Engine": (new(states="factored", adam_w_mode=True), N, (
        FACTORED, "FP4Adam with as_te=True", "without adam_w_mode")),
    "factored: L2 decay": (new(states="factored", decoupled_weight_decay=False), N, (FACTORED,
        "got False, torch.int8")),
    "factored: L2 decay of a group": (call(lambda s: FP4Adam([s.weight], states="factored")
        .add_param_group({"params": [s.late], "decoupled_weight_decay": False})), N, (FACTORED,)),
    "factored: masters in FP16": (new(states="factored", master_weight_dtype=torch.float16), N, (
        FACTORED, "got True, torch.float16")),
    "factored: amsgrad": (new(states="factored", amsgrad=True), N, ("with amsgrad, got factored",)),
    "complex parameter": (of(lambda s: [s.late, torch.ones(3, dtype=torch.complex64)]), V, (
        "be real and", "got torch.complex64", "view_as_real")),
    "sparse parameter": (of(lambda s: [torch.eye(3).to_sparse()]), V, ("and dense for",
        "torch.sparse_coo", "SparseAdam")),
    "parameter in 8 bits": (of(lambda s: [nn.Parameter(torch.ones(4).to(E4M3))]), T, (
        "must be float64", "float8_e4m3fn", "make_trainable")),
    "result of an operation": (of(lambda s: [s.weight.clone()]), V, ("non-leaf",)),
    "weight made in inference mode": (of(inference_weight), R, ("must be ordinary tensors",
        "got one that was made in inference mode", "clone the parameter")),
    "vector made in inference mode": (of(inference_vector), R, ("in inference mode", "clone")),
    # Adapters
    "adapter: no class of tensors": (call(lambda s: register_adapter(3, TensorAdapter())), T, (
        "tensor_class must be a class or its name", "got 3", "'module.Class'")),
    # Scale groups
    "group: unknown member": (call(lambda s: FP4Adam([*s.model.named_parameters()][1:],
        scale_groups=[["x"]])), V, ("among the 2 quant", "got 'x'", "model.named_parameters()")),
    "group: plain member": (new(scale_groups=[["up.weight", "head.weight"]]), V, (
        "NVFP4 or Float8 weights", "'head.weight', a plain tensor", "leave it out")),
    "group: a member twice": (new(scale_groups=[["up.weight", "up.weight"]]), V, ("one scale group",
        "'up.weight' twice", "join")),
    "group: text": (new(scale_groups="up.weight"), T, ("list of lists", "got str;", "[[name, ")),
    "group: names": (new(scale_groups=[["up.weight"], "x"]), T, ("got str in the list; pass",)),
    **{f"group: {words} without names": (call(lambda s, x=x: FP4Adam(s.model.parameters(),
        scale_groups=x)), V, ("have names", f"got {words}", "named_parameters()"))
        for words, x in (("a rule", hf_scale_groups), ("'x'", [["x"]]))},
    # The step
    "gradient: layout of oneDNN": (with_grad(Tensor.to_mkldnn), R, ("got layout torch._mkldnn",
        "SparseAdam")),
    "gradient: integers": (with_grad(Tensor.int), T, ("must be float32", "got torch.int32")),
    "gradient: quantized": (with_grad(lambda g: NVFP4Quantizer().quantize(g)), T, (
        "must be plain tensors", "NVFP4Tensor")),
    "gradient: another shape": (with_grad(lambda g: g[1:]), V, ("(64, 96)", "got (95, 64)")),
    "gradient: meta": (with_grad(lambda g: g.to("meta")), V, ("shape and device", "on meta")),
    "gradient: 8 bits": (with_param(lambda s: torch.ones(4).double(), E4M3), T, ("must be float32",
        "float8_e4m3fn")),
    "parameter: integers": (with_param(lambda s: torch.ones(4).int()), R, ("floating point Tensors",
        "got torch.int32")),
    "parameter: 8 bits": (with_param(lambda s: torch.ones(4).to(E4M3)), T, ("must be float64",
        "float8_e4m3fn")),
    "parameter: meta": (with_param(lambda s: NVFP4Quantizer().make_empty((64, 96), device="meta")),
        R, ("on meta; materialize them",)),
    "gradient: a list": (with_grad(lambda g: [1.0]), T, ("plain tensors for", "a list", "assign")),
    "step: in inference mode": (in_inference_mode, R, ("must not be called in inference mode",
        "got torch.inference_mode()", "call it outside")),
    "step: a slice twice": (overlapping, V, ("once", "(32, 64), twice", "remove one")),
    "step: a slice in a group": (slice_in_a_group, N, ("whole quantized tensors", "(32, 64)")),
    "initialize: integers": (call(lambda s: FusedAdam([p := torch.ones(4).int()]).initialize_state(
        p)), R, ("floating point Tensors", "got torch.int32")),
    "step: flat parameters": (with_group(params=[nn.Parameter(torch.ones(64))]), R, (
        "must stay in their groups", "DeepSpeed", "fully_shard")),
    "reset: unknown parameter": (
        call(lambda s: s.optimizer.reset_master_weights([s.weight, s.late])), V, ("got number 1",),
    ),
    # The norm of gradients
    "clip: below zero": (call(lambda s: s.optimizer.clip_grad_norm_(-1)), V, (">= 0", "-1", "inf")),
    "clip: NaN": (call(lambda s: s.optimizer.clip_grad_norm_(NAN)), V, (">= 0", "nan", "inf")),
    "clip: None": (call(lambda s: s.optimizer.clip_grad_norm_(None)), T, ("number", "None", "inf")),
    "clip: gradients that change": (call(lambda s: s.optimizer.clip_grad_norm_(0) and (
        s.weight.decoupled_grad.neg_(), with_group(lr=0.0)(s)())), R, ("got 1 of 5 that have",)),
    "clip: norm as text": (call(lambda s: s.optimizer.clip_grad_norm_(1, "two")), V, ("'two'",)),
    # Loading a state
    "state: of a model": (call(lambda s: s.optimizer.load_state_dict(s.model.state_dict())), V, (
        "must have state and param_groups", "got ['down.weight'", "a model's goes to the model")),
    "state: sparse": (loading_state("exp_avg", torch.ones(96, 64).to_sparse()), V, (
        "exp_avg of parameter 0 must be a floating point tensor", "torch.sparse_coo", "damaged")),
    "state: meta": (loading_state("master_param", torch.ones(96, 64, device="meta")), V, (
        "master_param of parameter 0 must be", "on meta", "damaged")),
    "state: integers": (loading_state("exp_avg_sq", torch.ones(96, 64).int()), V, (
        "must be a floating point tensor", "torch.int32", "converted")),
    "state: another shape": (loading_state("exp_avg", torch.ones(3)), V, ("shape (96, 64)",
        "got (3,)", "the model that it was saved from")),
    "state: no moment": (loading(lambda saved: saved["state"][1].pop("exp_avg")), V, (
        "state of parameter 1 must hold step, exp_avg and exp_avg_sq",)),
    "state: vector as step": (loading_state("step", torch.ones(2)), V, ("one number >= 0",)),
    "state: other groups": (loading(lambda saved: saved["param_groups"].append({"params": []})), V,
        ("different number of parameter groups",)),
    "state: fewer parameters": (loading(lambda saved: saved["param_groups"][0]["params"].pop()), V,
        ("parameter group that doesn't match",)),
    "state: step NaN": (loading_state("step", NAN), V, ("number >= 0", "got nan", "damaged")),
    "state: of SGD": (loading(lambda saved: saved["state"].update({0: {"momentum_buffer": 1}})), V,
        ("must hold step, exp_avg", "momentum_buffer", "another kind of optimizer")),
    "state: no means by column": (loading_state("exp_avg_sq_rows", torch.ones(96)), V, (
        "exp_avg_sq_columns of parameter 0 must be a floating", "got NoneType", "damaged")),
    "state: means by row cut": (loading_state("exp_avg_sq_rows", torch.ones(3)), V, (
        "exp_avg_sq_rows of parameter 0 must have shape (96,), got (3,)",)),
    "state: learning rate NaN": (loading_group(lr=NAN), V, ("learning rate: nan", AT_LEAST_0)),
    "state: one beta": (loading_group(betas=(0.9,)), V, ("betas must be two numbers, got",)),
    "compact: scales lost": (loading_compact(lambda s: s.pop("exp_avg_scale")), V, (
        "floating point tensor, got torch.uint8",)),
    "compact: scales cut": (cut("exp_avg_scale"), V, ("scales of exp_avg of",)),
    "compact: scales cast": (cast("exp_avg_scale", torch.float32), V, (
        "must be uint8, got torch.float32",)),
    "compact: codes cast": (cast("exp_avg", torch.int32), V, ("must be uint8, got torch.int32",)),
    "compact: codes cut": (cut("exp_avg_sq"), V, ("must have shape",)),
    "compact: remainder cast": (cast("param_remainder", torch.float32), V, (
        "param_remainder of parameter 0 must be int16, got torch.float32",)),
    "compact: remainder cut": (cut("param_remainder"), V, ("param_remainder of parameter 0 must",)),
    "remainder: an FP32 parameter": (loading_state("param_remainder", torch.ones(96, 64).short()),
        V, ("must belong to a bfloat16 parameter, got torch.float32", "to change the dtype")),
    "compact: codes of a master": (loading_compact(lambda s: s.update(
        master_param=torch.ones(40, 3), weight_digest=torch.zeros(1).long())), V, ("int8, got",)),
    "compact: digest": (loading_compact(lambda s: s.update(master_param=torch.ones(40, 3).char(),
        weight_digest=torch.zeros(2).long())), V, ("weight_digest of parameter 0 must have",)),
    "plain values assigned": (assigning, V, ("assign must be", "'down.weight'", "leave assign")),
    # Quantizers and tensors
    "quantize: sparse": (call(lambda s: NVFP4Quantizer().quantize(torch.eye(32).to_sparse())), T,
        (DENSE, "torch.sparse_coo", "x.to_dense()")),
    "write: a list": (call(lambda s: s.weight.quantize_([1.0])), T, (DENSE, "got a list")),
    "write: shape": (call(lambda s: s.weight.quantize_(torch.ones(64, 96))), V, ("(96, 64), got",
        "(64, 96)", "reshape")),
    # Models
    "recipe: a class": (quantizing(recipe=NVFP4Quantizer), T, ("recipe must be", "got type")),
    "model: a weight": (call(lambda s: quantize_model(s.weight, "nvfp4")), T, ("an nn.Module",
        "got NVFP4Tensor", "pass the model")),
    "filter: text": (quantizing(filter="head"), T, ("must be a function", "'head'", "lambda mod")),
    "model: a layer of float64": (quantizing(lambda net: net.down.double()), T, ("layer 'down'",
        "got torch.float64", "convert")),
    "model: a lazy layer": (
        quantizing(lambda net: setattr(net, "lazy", nn.LazyLinear(32))), V,
        ("weight of layer 'lazy'", "got one without a shape", "after the first forward pass"),
    ),
    # What matmuls quantize
    "recipe: of a recipe": (call(lambda s: Recipe(FP8_MATMULS)), T, ("weights must be a format",
        "got Recipe(weights='float8block'", "dataclasses.replace")),
    "recipe: weights of one direction": (
        call(lambda s: Recipe(MXFP8Quantizer(columnwise=False), gradients=True)), V,
        ("must have columnwise codes", "columnwise=False", "columnwise=True"),
    ),
    "recipe: a format of activations": (call(lambda s: Recipe("nvfp4", activations="mxfp8")), T, (
        "activations must be True, False or \"fake\"", "got 'mxfp8'", "the format of the weights")),
    "layer: input of another width": (in_layer(3, 96), V, ("[..., 64]", "got (3, 96)", "in_feat")),
    # Several GPUs, of which there is none
    "FSDP2: gather what is not sharded": (
        call(lambda s: s.weight.fsdp_pre_all_gather(None)), R,
        ("sharded by fully_shard", "(96, 64)", "quantize the model first"),
    ),
    "ZeRO: no process group": (scattering([torch.ones(8)], [0]), R, ("ranks of a process group",
        "got none", "init_process_group")),
    # Export
    "export: a state": (
        call(lambda s: export_checkpoint(s.model.state_dict(), s.folder)), T,
        ("an nn.Module", "got OrderedDict", "pass the model"),
    ),
    "export: no optimizer": (
        call(lambda s: export_masters(s.model, None, s.folder)), T,
        ("optimizer must be", "got NoneType", "pass the FP4Adam"),
    ),
    "export: a number as config": (call(lambda s: export_checkpoint(s.model, s.folder, config=3)),
        T, ("config must be a dictionary", "got a int")),
    "export: masters in float64": (call(lambda s: export_masters(
        s.model, s.optimizer, s.folder, torch.float64)), T, ("must be float32, bfloat16 or fl",)),
    "export: text in the state": (with_text, T, ("must hold tensors, got a str for '_extra_state'",
        "remove it")),
    # Import
    "import: no model": (call(lambda s: import_checkpoint("x", s.folder)), T, ("got str",)),
    "import: another format": (importing(quantizer=MXFP8Quantizer()), V, ("must be a NVFP4Quant",
        "got MXFP8Quantizer", "leave it out")),
    "import: no direction": (importing(quantizer=NVFP4Quantizer(rowwise=False)), V, ("rowwise=T",)),
    "import: an average inside": (importing(
        lambda net: setattr(net, "late", AveragedModel(net.late))), V, ("by AveragedModel",)),
    "config: missing": (removing("config.json"), F, ("must exist", "pass the folder of")),
    "layer without scales": (without("up.weight_scale"), V, ("'up.weight'", "no 'up.weight_sc")),
    "layer without a bias": (without("up.bias"), V, ("lacks 1", "'up.bias'", "config.json")),
    "tensor too many": (tensors(lambda t: t.update(more=torch.ones(1))), V, ("lacks 1", "'more'")),
    "codes of another dtype": (replacing("up.weight_packed", Tensor.int), T, ("torch.uint8",
        "got torch.int32", "damaged")),
}  # fmt: skip


@pytest.mark.table
@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_and_changes_nothing(name, tmp_path):
    misuse, error, words = MISUSES[name]
    scene = Scene(tmp_path)
    refused = misuse(scene)
    before = scene.contents()
    with pytest.raises(error) as caught:
        refused()
    assert caught.type is error
    text = str(caught.value)
    assert [word for word in words if word not in text] == [], text
    assert scene.contents() == before


def test_a_step_does_not_look_at_numbers_on_a_device():
    there = torch.zeros((), device="meta")  # to look at it raises, where a GPU would be waited for
    optimizer = FP4Adam([torch.ones(1)], capturable=True)
    optimizer.param_groups[0] |= {"betas": (there, there)}
    optimizer.step()
    assert optimizer.param_groups[0]["lr"].dtype == torch.float64  # which replays can read
    optimizer.param_groups[0]["weight_decay"] = math.nan
    with pytest.raises(ValueError, match="weight_decay"):
        optimizer.step()
