"""FP4Adam beside Transformer Engine itself: bytes, modules, workspaces, shards, checkpoints, times.

    python benchmarks/te_check.py [--parts bytes,modules,workspaces,...] [--json te.json]

It needs a GPU and Transformer Engine (README.md says how to install it), and runs the formats that
Transformer Engine has on that GPU. A part that fails says why in its row, and the exit status is 1.
"""

import argparse
import copy
import gc
import importlib.metadata
import io
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from engine import RECIPES
from provenance import about
from report import write_json
from step import Clock
from torch import Tensor, nn
from torch.nn import Parameter

import fp4adam
from fp4adam import FP4Adam, FusedAdam, cast, fp8_utils, workspaces_of
from fp4adam.tensors.quantizer import Quantizer

Row = dict[str, Any]

OPTIONS = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
STEPS = 20
# Weights of the parts that measure times: those of a GPT, 973 M parameters.
SHAPES = [(3072, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)] * 16
# This package's quantizer for each format.
QUANTIZERS: dict[str, Quantizer] = {
    "Float8": fp4adam.Float8Quantizer(),
    "Float8 delayed": fp4adam.Float8Quantizer(scaling="delayed", amax_history_len=4),
    "Float8Block": fp4adam.Float8BlockQuantizer(),
    "MXFP8": fp4adam.MXFP8Quantizer(),
    "NVFP4": fp4adam.NVFP4Quantizer(),
}
# Attributes of Transformer Engine's tensors, by ours.
FIELDS = {
    name: f"_{name}"
    for name in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
}
FLOAT8_FIELDS = {
    "rowwise_data": "_data",
    "rowwise_scale_inv": "_scale_inv",
    "columnwise_data": "_transpose",
}


def packages() -> tuple[Any, Any, Any]:
    """Transformer Engine's modules, recipes and optimizers."""
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe
        from transformer_engine.pytorch import optimizers
    except (ImportError, OSError) as error:
        raise SystemExit(f"Transformer Engine could not be imported: {error}") from error
    if not torch.cuda.is_available():
        raise SystemExit("Transformer Engine needs a CUDA device, got none")
    return te, recipe, optimizers


def formats(te: Any, recipes: Any) -> Iterator[tuple[str, Any, Quantizer]]:
    """The formats that run here: name, recipe, and quantizer of this package."""
    for name, (recipe, check) in RECIPES.items():
        runs, why = getattr(te, check)(return_reason=True)
        if runs:
            yield name, getattr(recipes, recipe)(), QUANTIZERS[name]
        else:
            print(f"{name}: not on this GPU: {why}", flush=True)


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Normal values on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda") * scale


def te_fields(tensor: Tensor) -> dict[str, Tensor]:
    """Copies of the codes and scales of a tensor of Transformer Engine, by our names."""
    names = FLOAT8_FIELDS if hasattr(tensor, "_transpose") else FIELDS
    found = {ours: getattr(tensor, theirs) for ours, theirs in names.items()}
    if getattr(tensor, "_transpose_invalid", False):
        found.pop("columnwise_data")
    return {name: x.clone() for name, x in found.items() if x is not None}


def extents(shape: tuple[int, int], quantizer: Quantizer) -> dict[str, tuple[int, int]]:
    """The scales that stand for blocks, rows and columns of each field; the rest is padding."""
    rows, cols = shape
    block = quantizer.layout.block
    if isinstance(quantizer, fp4adam.Float8BlockQuantizer):
        rows, cols = -(-rows // block), -(-cols // block)
        return {"rowwise_scale_inv": (rows, cols), "columnwise_scale_inv": (cols, rows)}
    if isinstance(quantizer, fp4adam.MXFP8Quantizer):
        return {
            "rowwise_scale_inv": (rows, cols // block),
            "columnwise_scale_inv": (rows // block, cols),
        }
    return {
        "rowwise_scale_inv": (rows, cols // block),
        "columnwise_scale_inv": (cols, rows // block),
    }


def differing(
    actual: dict[str, Tensor], expected: dict[str, Tensor], known: dict[str, tuple[int, int]]
) -> dict[str, float]:
    """The share of bytes that differ, by field, without padding; ``known`` from `extents`."""
    shares = {}
    for name in actual.keys() & expected.keys():
        a, b = actual[name], expected[name]
        if name in known and a.dim() == b.dim() == 2:
            rows, cols = known[name]
            a, b = a[:rows, :cols], b[:rows, :cols]
        bits = [x.contiguous().view(-1).view(torch.uint8) for x in (a, b)]
        shares[name] = (bits[0] != bits[1]).float().mean().item()
    return dict(sorted(shares.items()))


def linear(te: Any, recipe: Any, shape: tuple[int, int]) -> nn.Module:
    """A linear layer of Transformer Engine whose weight is quantized."""
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        return te.Linear(shape[1], shape[0], bias=False, params_dtype=torch.bfloat16, device="cuda")


def bytes_rows(te: Any, recipes: Any, optimizers: Any) -> Iterator[Row]:
    """After every one of 20 steps, the bytes against Transformer Engine's quantizers."""
    for name, recipe, quantizer in formats(te, recipes):
        if quantizer.layout.tensor_scale == "delayed":
            continue
        kinds = [((512, 768), kind) for kind in ("its tensor", "own tensor")]
        if name == "Float8":
            # Rows of eight, which its matmuls take.
            kinds += [((1000, 784), f"{kind}, 1000 rows") for _, kind in kinds]
        for shape, kind in kinds:
            weight = linear(te, recipe, shape).weight
            theirs = weight._quantizer.copy()
            theirs.set_usage(rowwise=True, columnwise=True)
            value = weight.get_high_precision_init_val().cuda()
            if kind.startswith("own"):
                weight = Parameter(quantizer.quantize(value))
            optimizer, worst = FP4Adam([weight], **OPTIONS), {}
            for step in range(STEPS):
                weight.grad = random(*shape, seed=step, scale=1e-2).to(weight.dtype)
                optimizer.step()
                expected = te_fields(theirs(optimizer.state[weight]["master_param"].clone()))
                if kind.startswith("own"):
                    own = {field: getattr(weight, field) for field in FIELDS}
                else:
                    own = te_fields(weight)
                shares = differing(own, expected, extents(shape, quantizer))
                worst = {field: max(share, worst.get(field, 0)) for field, share in shares.items()}
            assert worst, "no field was compared"
            yield {"format": name, "what": kind, "differing": worst, "ok": not any(worst.values())}
    yield from delayed_rows(te, recipes)


def delayed_rows(te: Any, recipes: Any) -> Iterator[Row]:
    """Codes, amaxes and scales of delayed scaling, under the scale that a history gives."""
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    for kind in ("its tensor", "own tensor"):
        if kind == "its tensor":
            weight = linear(te, recipes.DelayedScaling(), (512, 768)).weight
        else:
            quantizer = fp4adam.Float8Quantizer(scaling="delayed", amax_history_len=4)
            weight = Parameter(quantizer.quantize(random(512, 768, seed=0, scale=0.02)))
        optimizer, worst = FP4Adam([weight], **OPTIONS), {}
        for step in range(STEPS):
            weight.grad = random(512, 768, seed=step, scale=1e-2).to(weight.dtype)
            if kind == "its tensor":
                # As the next forward pass would do.
                amax = random(1, seed=step).abs()
                scale = weight._quantizer.scale
                scale.copy_((torch.full_like(amax, 448) / amax).view(scale.shape))
                weight._quantizer.amax.zero_()
            optimizer.step()
            if kind == "its tensor":
                own, scale = te_fields(weight), weight._quantizer.scale
                own["amax"] = weight._quantizer.amax.clone()
            else:
                own, scale = {field: getattr(weight, field) for field in FIELDS}, weight.scale
                own["amax"] = weight.amax_history[:1]
            theirs = Float8Quantizer(
                scale=scale.clone(),
                amax=torch.zeros(1, device="cuda"),
                fp8_dtype=DType.kFloat8E4M3,
            )
            expected = te_fields(theirs(optimizer.state[weight]["master_param"].clone()))
            expected["amax"] = theirs.amax
            shares = differing(own, expected, {})
            worst = {field: max(share, worst.get(field, 0)) for field, share in shares.items()}
        ok = not any(worst.values())
        yield {"format": "Float8 delayed", "what": kind, "differing": worst, "ok": ok}


def module_builders(te: Any) -> dict[str, Callable[[], nn.Module]]:
    """Modules of Transformer Engine that map [tokens, 1, 512] to the same."""
    common = dict(params_dtype=torch.bfloat16, device="cuda")
    return {
        "Linear": lambda: te.Linear(512, 512, **common),
        "LayerNormLinear": lambda: te.LayerNormLinear(512, 512, **common),
        "LayerNormMLP": lambda: te.LayerNormMLP(512, 2048, **common),
        "TransformerLayer": lambda: te.TransformerLayer(
            512,
            2048,
            8,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            fuse_qkv_params=True,  # needed for a quantized weight
            **common,
        ),
    }


def train(te: Any, recipe: Any, module: nn.Module, optimizer: Any) -> tuple[list[float], float]:
    """Losses of 20 steps towards a rotation of the input, and the share of stale transposes.

    A transpose of Float8 codes that counts as valid is not made again by Transformer Engine. Stale
    ones are declared invalid here, so that losses can be compared.
    """
    losses, stale = [], 0.0
    for step in range(STEPS):
        x = random(256, 1, 512, seed=step).bfloat16()
        with te.autocast(enabled=True, recipe=recipe):
            y = module(x)
        loss = (y.float() - x.roll(1, dims=-1).float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        for param in module.parameters():
            if getattr(param, "_transpose", None) is not None and not param._transpose_invalid:
                share = (param._transpose != param._data.t()).float().mean().item()
                stale = max(stale, share)
                if share:
                    param._reset_caches()
    return losses, stale


def modules_rows(te: Any, recipes: Any, optimizers: Any) -> Iterator[Row]:
    """Every module trained with both optimizers, from the same masters."""
    for name, recipe, _ in formats(te, recipes):
        for kind, build in module_builders(te).items():
            row = {"format": name, "what": kind}
            try:
                yield {**row, **module_row(te, recipe, optimizers, build)}
            except Exception as error:
                yield {**row, "why": f"{type(error).__name__}: {error}", "ok": False}


def module_row(te: Any, recipe: Any, optimizers: Any, build: Callable[[], nn.Module]) -> Row:
    """Losses of one module with both optimizers."""
    losses, stale = [], []
    for ours in (False, True):
        torch.manual_seed(0)
        with te.quantized_model_init(recipe=recipe):
            module = build()
        # Without initial values, both start from the decoded weights.
        if ours:
            optimizer = FP4Adam(module.parameters(), **OPTIONS)
        else:
            optimizer = optimizers.FusedAdam(module.parameters(), **OPTIONS, master_weights=True)
        for found, value in zip((losses, stale), train(te, recipe, module, optimizer), strict=True):
            found.append(value)
    apart = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
    falls = all(each[-1] < each[0] for each in losses)
    return {
        "first": losses[1][0],
        "last (TE, ours)": [each[-1] for each in losses],
        "largest relative difference": apart,
        "stale transposes (TE, ours)": stale,
        # Masters differ in the last bits, codes therefore seldom.
        "ok": falls and apart < 0.02 and not stale[1],
    }


def workspaces_rows(te: Any, recipes: Any, optimizers: Any) -> Iterator[Row]:
    """Modules with BF16 weights, whose workspaces are written after the step or by themselves."""
    for name, recipe, quantizer in formats(te, recipes):
        for kind, build in {**module_builders(te), **split_builders(te)}.items():
            row = {"format": name, "what": kind}
            try:
                yield {**row, **workspaces_row(te, recipe, quantizer, build)}
            except Exception as error:
                yield {**row, "why": f"{type(error).__name__}: {error}", "ok": False}


def split_builders(te: Any) -> dict[str, Callable[[], nn.Module]]:
    """Modules whose fused weights are split into several parameters, and with several weights."""
    common = dict(params_dtype=torch.bfloat16, device="cuda")
    return {
        "Linear, split": lambda: te.Linear(512, 512, parameters_split=("a", "b"), **common),
        "TransformerLayer, split": lambda: te.TransformerLayer(
            512, 2048, 8, hidden_dropout=0.0, attention_dropout=0.0, **common
        ),
    }


def workspaces_row(te: Any, recipe: Any, quantizer: Quantizer, build: Callable) -> Row:
    """Five steps of two microbatches: with workspaces that the step writes, and with others."""
    losses, worst, same, addresses = [], {}, True, []
    for ours in (False, True):
        torch.manual_seed(0)
        module = build()
        optimizer = FusedAdam(module.parameters(), **OPTIONS)
        if ours:
            optimizer.register_step_post_hook(lambda *_, own=module: cast(*workspaces_of(own)))
        losses.append([])
        for step in range(5):
            for microbatch in range(2):
                x = random(256, 1, 512, seed=2 * step + microbatch).bfloat16().requires_grad_()
                with te.autocast(enabled=True, recipe=recipe):
                    y = module(x, is_first_microbatch=not ours and not microbatch)
                loss = (y.float() - x.detach().roll(1, dims=-1).float()).square().mean()
                loss.backward()
                losses[-1].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if not ours:
                continue
            copies, weights = workspaces_of(module)
            addresses.append([*map(te_addresses, copies)])
            for tensor, parts in zip(copies, weights, strict=True):
                weight = torch.cat([part.detach() for part in parts])
                theirs = tensor._quantizer.copy()
                theirs.set_usage(rowwise=True, columnwise=True)
                theirs.internal = False
                if quantizer.layout.tensor_scale == "delayed":
                    theirs.amax = theirs.amax.clone()
                expected = te_fields(theirs(weight))
                known = extents(tuple(weight.shape), quantizer)
                for field, share in differing(te_fields(tensor), expected, known).items():
                    worst[field] = max(share, worst.get(field, 0))
            x = random(256, 1, 512, seed=100 + step).bfloat16().requires_grad_()
            with te.autocast(enabled=True, recipe=recipe):  # scales change when it ends
                outputs = [module(x, is_first_microbatch=first) for first in (False, True)]
            same = same and torch.equal(*outputs)
    apart = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
    stay = all(each == addresses[0] for each in addresses)
    ok = worst and not any(worst.values()) and same and stay and apart < 1e-2
    return {
        "workspaces": len(addresses[0]),
        "differing": worst,
        "output of False is that of True": same,
        "addresses stay": stay,
        "losses apart": apart,
        "ok": bool(ok),
    }


def te_addresses(tensor: Tensor) -> list[int]:
    """Addresses of the codes and scales of a tensor of Transformer Engine."""
    names = {*FIELDS.values(), *FLOAT8_FIELDS.values()}
    found = (getattr(tensor, name, None) for name in sorted(names))
    return [x.data_ptr() for x in found if x is not None]


def workspace_times_rows(te: Any, recipes: Any, optimizers: Any) -> Iterator[Row]:
    """Milliseconds to write all workspaces of 973 M parameters, at once and one by one."""
    clock = Clock("cuda")
    for name, recipe, _ in formats(te, recipes):
        gc.collect()
        torch.cuda.empty_cache()
        common = dict(bias=False, params_dtype=torch.bfloat16, device="cuda")
        model = nn.ModuleList(te.Linear(cols, rows, **common) for rows, cols in SHAPES)
        for layer in model:
            x = torch.ones(128, layer.in_features, device="cuda", dtype=torch.bfloat16)
            with te.autocast(enabled=True, recipe=recipe):
                layer(x.requires_grad_(), is_first_microbatch=True)
        pairs = [(layer._fp8_workspaces["weight"], layer.weight.detach()) for layer in model]

        def ours(model: nn.Module = model) -> None:
            cast(*workspaces_of(model))

        def theirs(pairs: list = pairs) -> None:
            for tensor, weight in pairs:
                tensor.quantize_(weight)

        for what, write in (("cast", ours), ("TE's quantize_", theirs)):
            ms = statistics.median(clock.samples(write, 15))
            yield {"format": name, "what": what, "ms": ms, "host ms": clock.host(write), "ok": True}
        del model, pairs, ours, theirs


def zero_rows(te: Any, recipes: Any, optimizers: Any) -> Iterator[Row]:
    """Slices of masters quantized into TE's tensors, by both packages' functions."""
    from transformer_engine.pytorch.tensor import utils

    shape = (512, 768)
    n = shape[0] * shape[1]
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    for name, recipe, quantizer in formats(te, recipes):
        for start, stop in ((0, n), (0, n // 2), (n // 2 + 768 * 3 + 128, n)):
            master = random(stop - start, seed=start, scale=0.03)
            fields = []
            for package in (utils, fp8_utils):
                weight = linear(te, recipe, shape).weight
                if quantizer.layout.tensor_scale == "delayed":
                    weight._quantizer.scale.fill_(448 * 8.0)
                arguments = ([weight], [master.clone()], [start], None)
                package.quantize_master_weights(*arguments, manual_post_all_gather_processing=True)
                package.post_all_gather_processing([weight])
                found = te_fields(weight)
                # Codes of other slices are those of other ranks, gathered afterwards.
                found["rowwise_data"] = found["rowwise_data"].view(-1)[start:stop]
                if stop - start < n:
                    found.pop("columnwise_data", None)
                if quantizer.layout.tensor_scale == "delayed":
                    found["amax"] = weight._quantizer.amax.clone()
                fields.append(found)
            shares = differing(*fields, extents(shape, quantizer))
            ok = len(shares) > 1 and not any(shares.values())
            yield {"format": name, "what": [start, stop], "differing": shares, "ok": ok}


def checkpoints_rows(te: Any, recipes: Any, optimizers: Any) -> Iterator[Row]:
    """A state dict of each optimizer goes on in the other as in itself."""
    shape = (512, 768)

    def made(ours: bool, recipe: Any) -> tuple[Parameter, Any]:
        weight = linear(te, recipe, shape).weight
        weight.clear_high_precision_init_val()
        if ours:
            return weight, FusedAdam([weight], **OPTIONS)
        return weight, optimizers.FusedAdam([weight], **OPTIONS, master_weights=True)

    def step(weight: Parameter, optimizer: Any, seed: int) -> None:
        weight.grad = random(*shape, seed=seed, scale=1e-2).bfloat16()
        optimizer.step()

    for name, recipe, _ in formats(te, recipes):
        for from_ours in (False, True):
            weight, optimizer = made(from_ours, recipe)
            for seed in range(3):
                step(weight, optimizer, seed)
            saved, masters = copy.deepcopy(optimizer.state_dict()), []
            other_weight, other = made(not from_ours, recipe)
            with torch.no_grad():
                other_weight.copy_(weight)
            other.load_state_dict(saved)
            for each in ((weight, optimizer), (other_weight, other)):
                step(*each, 3)
                masters.append(each[1].state[each[0]]["master_param"].float())
            apart = (masters[0] - masters[1]).abs().max().item()
            what = "ours to TE" if from_ours else "TE to ours"
            yield {"format": name, "what": what, "masters apart": apart, "ok": apart < 1e-6}


def reference_rows(te: Any, recipes: Any, optimizers: Any) -> Iterator[Row]:
    """Masters beside torch.optim.Adam from the decoded weights, as TE tests its own optimizer."""
    for name, recipe, quantizer in formats(te, recipes):
        weight = linear(te, recipe, (256, 256)).weight
        weight.clear_high_precision_init_val()
        kind = type(weight)
        reference = Parameter(weight.dequantize(dtype=torch.float32).detach().clone())
        options = dict(lr=1.0, betas=(0.1, 0.25), eps=1e-8, weight_decay=0.0)
        optimizer = FP4Adam([weight], **options, use_decoupled_grad=True)
        adam = torch.optim.Adam([reference], **options)
        for step in range(5):
            reference.grad = random(256, 256, seed=step)
            weight.decoupled_grad = reference.grad.clone()
            optimizer.step()
            adam.step()
        master = optimizer.state[weight]["master_param"]
        apart = (master - reference).abs().max().item()
        values = weight.dequantize(dtype=torch.float32)
        off = (values - reference).abs().max().item() / reference.abs().max().item()
        try:
            torch.testing.assert_close(master, reference.detach())
            ok = type(weight) is kind and off < 2.0 ** -(quantizer.layout.code_type.bits // 2)
        except AssertionError:
            ok = False
        row = {"masters apart": apart, "weights apart": off}
        yield {"format": name, "what": "torch.optim.Adam", **row, "ok": ok}


def resume_rows(te: Any, recipes: Any, optimizers: Any) -> Iterator[Row]:
    """State dicts through a file into a new model and optimizer: the same output and next step."""

    def trained(recipe: Any, seed: int, steps: range, saved: Any = None) -> tuple:
        torch.manual_seed(seed)
        with te.quantized_model_init(recipe=recipe):
            module = te.LayerNormMLP(512, 1024, params_dtype=torch.bfloat16, device="cuda")
        optimizer = FP4Adam(module.parameters(), **OPTIONS)
        if saved is not None:
            module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for step in steps:
            module.zero_grad()
            x = random(256, 512, seed=step).bfloat16()
            with te.autocast(enabled=True, recipe=recipe):
                y = module(x)
            (y.float() - x.float()).square().mean().backward()
            optimizer.step()
        return module, optimizer

    # Without it, it does not load what it has pickled itself for delayed scaling.
    os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"
    for name, recipe, _ in formats(te, recipes):
        module, optimizer = trained(recipe, 0, range(3))
        file = io.BytesIO()
        torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        other, loaded = trained(recipe, 1, range(0), saved)
        x, outputs = random(256, 512, seed=9).bfloat16(), []
        for each in (module, other):
            with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
                outputs.append(each(x))
        for model, own in ((module, optimizer), (other, loaded)):
            for i, param in enumerate(model.parameters()):
                param.grad = random(*param.shape, seed=i, scale=1e-2).to(param.dtype)
            own.step()
        masters = [
            [own.state[p]["master_param"] for p in model.parameters() if p.dtype != torch.float32]
            for model, own in ((module, optimizer), (other, loaded))
        ]
        row = {
            "same output": torch.equal(*outputs),
            "same masters": all(map(torch.equal, *masters)),
        }
        yield {"format": name, "what": "torch.save", **row, "ok": all(row.values())}


def graphs_rows(te: Any, recipes: Any, optimizers: Any) -> Iterator[Row]:
    """Forward passes replayed from a CUDA graph, after steps outside of it."""
    for name, recipe, quantizer in formats(te, recipes):
        if quantizer.layout.tensor_scale == "delayed":
            continue  # the graph would need Transformer Engine's own capture
        for what in ("quantized weights", "workspaces"):
            torch.manual_seed(0)
            with te.quantized_model_init(enabled=what == "quantized weights", recipe=recipe):
                module = te.Linear(512, 512, params_dtype=torch.bfloat16, device="cuda")
            optimizer = FP4Adam(module.parameters(), **OPTIONS)
            if what == "workspaces":
                optimizer.register_step_post_hook(lambda *_, own=module: cast(*workspaces_of(own)))
            x = random(256, 512, seed=0).bfloat16().requires_grad_()

            def forward(first: bool, module: Any = module, x: Tensor = x, on: Any = recipe) -> Any:
                with te.autocast(enabled=True, recipe=on):
                    return module(x, is_first_microbatch=first)

            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                forward(True)
                forward(False)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    y = forward(False)
            torch.cuda.synchronize()
            same = []
            for step in range(3):
                for i, param in enumerate(module.parameters()):
                    param.grad = random(*param.shape, seed=i + step, scale=1e-2).bfloat16()
                optimizer.step()
                graph.replay()
                replayed = y.detach().clone()
                same.append(torch.equal(replayed, forward(True)))
            yield {"format": name, "what": what, "replays are eager": same, "ok": all(same)}


def times_rows(te: Any, recipes: Any, optimizers: Any) -> Iterator[Row]:
    """Milliseconds of a step, of the host alone, and temporary memory; 973 M parameters."""
    clock = Clock("cuda")
    for name, recipe, _ in formats(te, recipes):
        for ours in (False, True):
            gc.collect()
            torch.cuda.empty_cache()
            weights = [linear(te, recipe, shape).weight for shape in SHAPES]
            for i, weight in enumerate(weights):
                weight.clear_high_precision_init_val()
                weight.grad = random(*weight.shape, seed=i, scale=1e-3).bfloat16()
            if ours:
                optimizer = FP4Adam(weights, **OPTIONS)
            else:
                optimizer = optimizers.FusedAdam(weights, **OPTIONS, master_weights=True)
            optimizer.step()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
            torch.cuda.synchronize()
            temporary = torch.cuda.max_memory_allocated() - before
            yield {
                "format": name,
                "what": "FP4Adam on TE's tensors" if ours else "TE FusedAdam on TE's tensors",
                "ms": statistics.median(clock.samples(optimizer.step, 15)),
                "host ms": clock.host(optimizer.step),
                "temporary MiB": temporary / 2**20,
                "ok": True,
            }
            del optimizer, weights


PARTS = {
    "bytes": bytes_rows,
    "modules": modules_rows,
    "workspaces": workspaces_rows,
    "zero": zero_rows,
    "checkpoints": checkpoints_rows,
    "reference": reference_rows,
    "resume": resume_rows,
    "graphs": graphs_rows,
    "times": times_rows,
    "workspace_times": workspace_times_rows,
}


def run(parts: list[str], after_each: Callable[[list[Row]], None] = lambda rows: None) -> list[Row]:
    """The rows of these parts; a part that raises ends with a row that says why."""
    given, rows = packages(), []
    for part in parts:
        found = PARTS[part](*given)
        while True:
            try:
                row = next(found, None)
            except Exception as error:
                row = {"what": "failed", "why": f"{type(error).__name__}: {error}", "ok": False}
                found = iter(())
            if row is None:
                break
            rows.append({"part": part, **row})
            print(rows[-1], flush=True)
            after_each(rows)
    return rows


def main() -> int:
    """Run the parts that the command line names; 1 if any row is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts must be some of {', '.join(PARTS)}, got {', '.join(unknown)}")

    def save(rows: list[Row]) -> None:
        if args.json:
            version = importlib.metadata.version("transformer_engine")
            write_json(args.json, {**about("cuda"), "transformer_engine": version}, rows)

    return int(not all(row["ok"] for row in run(parts, save)))


if __name__ == "__main__":
    sys.exit(main())
