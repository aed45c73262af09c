"""Members of a scale group have the bytes of their rows of one fused weight."""

import pytest
import torch
from torch import nn

from fp4adam import FP4Adam, NVFP4Quantizer, hf_scale_groups, quantize_model, quantized_init
from fp4adam.tensors import backend
from helpers import assert_identical, launched_by, set_grads

COLS = 32
NVFP4 = NVFP4Quantizer()
ROWS = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 16}
FUSED = ["q_proj.weight", "k_proj.weight", "v_proj.weight"]


class Attention(nn.Module):
    def __init__(self, rows=ROWS):
        super().__init__()
        for name, n in rows.items():
            self.add_module(name, nn.Linear(COLS, n, bias=False))


def make_model(device="cpu", recipe=NVFP4, scale_groups=hf_scale_groups, rows=ROWS):
    """The largest weight is in k, so that its amax is that of q, k and v."""
    torch.manual_seed(0)
    model = Attention(rows).to(device)
    with torch.no_grad():
        model.k_proj.weight.mul_(3)
    return quantize_model(model, recipe, scale_groups=scale_groups)


def masters(model, optimizer):
    return [optimizer.state[param]["master_param"] for param in model.parameters()]


def assert_fused(model, values):
    """The first three weights are rows of one, and the last one is by itself."""
    *members, alone = model.parameters()
    quantizer = alone.quantizer
    for group, parts in ((members, values[:-1]), ([alone], values[-1:])):
        fused, row = quantizer.quantize(torch.cat([part.detach() for part in parts])), 0
        for param in group:
            rows = slice(row, row + len(param))
            codes = slice(row // 2, rows.stop // 2)
            blocks = slice(row // 16, rows.stop // 16)
            assert torch.equal(param.amax_rowwise, fused.amax_rowwise)
            assert torch.equal(param.rowwise_data, fused.rowwise_data[rows])
            scales = param.rowwise_scale_inv[: len(param), : COLS // 16]
            assert torch.equal(scales, fused.rowwise_scale_inv[rows, : COLS // 16])
            assert torch.equal(param.columnwise_data, fused.columnwise_data[:, codes])
            scales = param.columnwise_scale_inv[:COLS, : len(param) // 16]
            assert torch.equal(scales, fused.columnwise_scale_inv[:COLS, blocks])
            row = rows.stop


def assert_same_bytes(*models):
    assert_identical(*([p.storage_tensors() for p in model.parameters()] for model in models))


def test_hugging_face_names():
    prefix = "model.layers.0."
    names = {
        "self_attn.q_proj.weight": "self_attn.qkv_proj",
        "self_attn.k_proj.weight": "self_attn.qkv_proj",
        "self_attn.o_proj.weight": None,
        "self_attn.q_proj.bias": None,
        "mlp.experts.3.up_proj.weight": "mlp.experts.3.gate_up_proj",
        "block_sparse_moe.experts.3.w1.weight": "block_sparse_moe.experts.3.w13",
        "block_sparse_moe.experts.3.w2.weight": None,
    }
    for name, fused in names.items():
        assert hf_scale_groups(prefix + name) == (fused and prefix + fused)
    assert hf_scale_groups("q_proj.weight") == "qkv_proj"


def test_members_take_the_launches_of_one_and_are_written_again_together(device, monkeypatch):
    """One master becomes the largest behind the optimizer's back."""
    monkeypatch.setattr(backend, "uses_kernels", lambda d: True)
    model = make_model(device)
    optimizer = FP4Adam(model.parameters(), lr=1e-4)
    for step in range(3):
        if step == 2:
            optimizer.state[model.v_proj.weight]["master_param"][0, 20] = 10.0
        set_grads(model.parameters(), step)
        launches = ["_amax_preview_kernel", "step_kernel", "_requantize_kernel"]
        assert launched_by(optimizer) == launches
        exceeding = optimizer._whole.plan._groups[0].launch._exceeding
        assert (exceeding > 0).tolist() == [step == 2, False]
        assert_fused(model, masters(model, optimizer))
    model.k_proj.weight.grad = None
    optimizer.step()
    assert_fused(model, masters(model, optimizer))


def test_groups_of_parameters_that_are_added_later(device):
    model = make_model(device)
    FP4Adam(model.parameters(), scale_groups=())
    assert all(param.scale_group is None for param in model.parameters())
    named = dict(model.named_parameters())
    first = FUSED[:1]
    optimizer = FP4Adam([(n, named[n]) for n in first], scale_groups=hf_scale_groups)
    rest = [(name, param) for name, param in named.items() if name not in first]
    optimizer.add_param_group({"params": rest, "lr": 1e-2})
    set_grads(model.parameters(), 0)
    optimizer.step()
    assert_fused(model, masters(model, optimizer))


def test_a_group_may_be_of_several_kinds(device, monkeypatch):
    """Members that no launch can step together, because of options of theirs or their blocks."""
    monkeypatch.setattr(backend, "uses_kernels", lambda d: True)
    model = make_model(device, scale_groups=())
    model.v_proj = nn.Linear(COLS, 16, bias=False, device=device)
    quantize_model(model.v_proj, NVFP4Quantizer(two_dimensional=False))
    params, own = [*model.parameters()], [dict(amsgrad=True), dict(lr=0.0), {}, {}]
    groups = [dict(params=[param], **options) for param, options in zip(params, own, strict=True)]
    optimizer = FP4Adam(groups, scale_groups=[params[:2], params[2:]])
    set_grads(params, 0)
    optimizer.step()
    for members in (params[:2], params[2:]):
        values = [optimizer.state[param]["master_param"] for param in members]
        for param, value in zip(members, values, strict=True):
            fused = param.quantizer.quantize(torch.cat([value, *values]))
            assert torch.equal(param.amax_rowwise, fused.amax_rowwise)
            assert torch.equal(param.rowwise_data, fused.rowwise_data[: len(param)])


@pytest.mark.parametrize("recipe", ["mxfp8", "float8block"])
def test_a_rule_changes_nothing_for_formats_without_an_amax(recipe):
    rows = dict.fromkeys(ROWS, 32)
    grouped = make_model(recipe=recipe, rows=rows)
    assert_same_bytes(grouped, make_model(recipe=recipe, scale_groups=(), rows=rows))
    FP4Adam(grouped.named_parameters(), scale_groups=hf_scale_groups)
    assert all(param.scale_group is None for param in grouped.parameters())


def test_quantized_init_forms_groups():
    with quantized_init(NVFP4, scale_groups=hf_scale_groups):
        model = Attention()
    assert_fused(model, [param.get_high_precision_init_val() for param in model.parameters()])
    pairs = [FUSED[:2], FUSED[2:] + ["o_proj.weight"]]
    quantize_model(model := Attention(), NVFP4, scale_groups=pairs)
    q, k, v, o = (param.amax_rowwise for param in model.parameters())
    assert q == k != v == o
    for _ in range(2):
        q, k, v, o = (param.scale_group for param in model.parameters())
        assert q is k is not v is o is not None
        FP4Adam(model.named_parameters(), scale_groups=pairs)  # which forms them anew


def test_a_part_of_a_group_is_refused_before_anything_changes():
    model = make_model()
    optimizer = FP4Adam([model.q_proj.weight, model.o_proj.weight])
    set_grads(model.parameters(), 0)
    with pytest.raises(ValueError, match="one optimizer, got 1 of q_proj.weight, k_proj.weight"):
        optimizer.step()
    assert_same_bytes(model, make_model())
    assert not optimizer.state
