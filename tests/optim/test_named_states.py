"""The accessors and checkpoints of Transformer Engine's FusedAdam, on this package's optimizers."""

import copy
import pickle

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Parameter

from fp4adam import FP4Adam, FusedAdam, NVFP4Quantizer, quantize_model
from helpers import (
    WithGradient,
    assert_bytes_are_of_masters,
    assert_identical,
    random,
    set_grads,
    take_steps,
)

NAMES = ("exp_avg", "exp_avg_sq", "master_param")
WITHOUT = dict(master_weights=False, store_param_remainders=False)
DTYPES = (0, torch.float32), (1, torch.bfloat16), (2, torch.float32)
STORED = {
    "fp32": {},
    "bf16": dict(exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16),
    "fp16": {f"{n}_dtype": torch.float16 for n in ("exp_avg", "exp_avg_sq", "master_weight")},
    "fp8": dict(exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8),
}


def weights(device="cpu") -> list[Parameter]:
    value = random((64, 96), 0, device).bfloat16()
    quantized = Parameter(NVFP4Quantizer().quantize(value))
    quantized._high_precision_init_val = value
    return [quantized, Parameter(random((5, 32), 1, device).bfloat16())]


# TE's example seeds masters by hand, in this order.
def test_masters_are_seeded_by_hand(path_device):
    params = weights(path_device)
    optimizer = FP4Adam(params, lr=1e-2)
    for param in params:
        optimizer.initialize_state(param, False)
    seed = params[0].get_high_precision_init_val().float() + 2.0**-12  # finer than BF16
    optimizer.set_scaled_state(params[0], "master_param", seed)
    params[0].clear_high_precision_init_val()
    assert torch.equal(optimizer.get_unscaled_state(params[0], "master_param"), seed)
    optimizer.param_groups[0]["lr"] = 1e-30
    take_steps(optimizer, [0])
    assert torch.equal(optimizer.get_unscaled_state(params[0], "master_param"), seed)
    assert_bytes_are_of_masters(optimizer)
    before = copy.deepcopy([param.detach() for param in params])
    for param in params:
        master = optimizer.get_unscaled_state(param, "master_param")
        optimizer.set_scaled_state(param, "master_param", 2 * master)
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(optimizer, [1])  # which writes nothing
    assert_identical([param.detach() for param in params], before)


@pytest.mark.parametrize("stored", STORED)
def test_states_are_read_and_written_in_fp32(stored, device):
    params = weights(device)
    optimizer = FusedAdam(params, lr=1e-2, **STORED[stored])
    take_steps(optimizer, [0])
    for param in params:
        state = optimizer.state[param]  # Megatron copies and shards every tensor of it
        assert len(state) == 3 and {*state} == {*NAMES} and state["step"] == 1  # by name
        assert all(value.shape == param.shape for value in state.values())
        for name in NAMES:
            value = optimizer.get_unscaled_state(param, name)
            exact = stored == "fp32" or (stored, name) != ("fp16", name) and name == "master_param"
            assert (value is optimizer.state[param][name]) == exact
    raw = optimizer.get_unscaled_state(params[0], "exp_avg", skip_unscale=True)
    assert raw.dtype == (torch.bfloat16 if stored == "bf16" else torch.float32)

    given = random((64, 96), 7, device, scale=0.1)
    kept = given.clone()
    for name in NAMES:
        wanted = given.abs() if name == "exp_avg_sq" else given
        optimizer.set_scaled_state(params[0], name, wanted)
        value = optimizer.get_unscaled_state(params[0], name)
        tolerance = {"fp32": 0, "bf16": 2**-7, "fp16": 2**-9, "fp8": 0.25}[stored]
        torch.testing.assert_close(value, wanted, rtol=tolerance, atol=tolerance * 0.01)
    assert torch.equal(given, kept)  # TE's rescales the caller's tensor


@pytest.mark.parametrize("name", ["exp_avg", "master_param"])
def test_states_that_are_set_after_parameters_were_written(name, device):
    """A parameter stays written when a moment is set; a master that is set holds."""
    param = weights(device)[0]
    optimizer = FP4Adam([param], lr=1e-30)
    optimizer.initialize_state(param)
    written, given = (random((64, 96), seed, device, scale=1.01) for seed in (0, 6))
    with torch.no_grad():
        param.copy_(written)
    optimizer.set_scaled_state(param, name, given)
    take_steps(optimizer, [1])
    expected = given if name == "master_param" else written
    assert_identical(optimizer.state[param]["master_param"], expected)


@pytest.mark.parametrize("remainders", [False, True])
def test_a_fp32_parameter_is_its_own_master(remainders, device):
    """As Megatron's precision-aware optimizer saves and loads it."""
    options = dict(store_param_remainders=remainders, use_decoupled_grad=True)

    def build():
        params = [Parameter(random((4, 8), i, device).to(dtype)) for i, dtype in DTYPES]
        return FusedAdam(params, **options), params

    optimizer, params = build()
    assert [*optimizer.state[params[0]]] == []
    optimizer.initialize_state(params[1], remainders)
    set_grads(params, 0, dtype=torch.float32)
    optimizer.step()
    for param in params:
        assert [*optimizer.state[param]] == [*NAMES] and len(optimizer.state[param]) == 3
    assert optimizer.state[params[0]]["master_param"].data_ptr() == params[0].data_ptr()
    states = [*optimizer.state.values()]
    for copies in (copy.deepcopy(optimizer.state), pickle.loads(pickle.dumps(optimizer.state))):
        assert_identical([*map(dict, copies.values())], [*map(dict, states)])
    saved = [{k: optimizer.get_unscaled_state(p, k).clone() for k in NAMES} for p in params]
    assert "master_param" not in optimizer.state_dict()["state"][0]
    coupled = FusedAdam(params[:1])
    coupled.initialize_state(params[0])
    assert [*coupled.state[params[0]]] == [*NAMES[:2]]
    assert not coupled.get_unscaled_state(params[0], "master_param").requires_grad

    # States without values come first, alike for all parameters.
    other, others = build()
    kinds = dict.fromkeys(NAMES, torch.uint8 if remainders else torch.float32)
    kinds["master_param"] = torch.int16 if remainders else torch.float32
    room = {name: torch.full((4, 8), 77, dtype=dtype) for name, dtype in kinds.items()}
    with torch.no_grad():
        torch._foreach_copy_(others, params)
    groups = optimizer.state_dict()["param_groups"]
    other.load_state_dict({"state": dict.fromkeys(range(3), room), "param_groups": groups})
    assert torch.equal(others[0], params[0])
    for param, state in zip(others, saved, strict=True):
        for name, value in state.items():
            other.set_scaled_state(param, name, value)
            with pytest.raises(TypeError, match=f"be {value.dtype} for {name}, got torch.int8"):
                other.set_scaled_state(param, name, value.char())
            assert_identical(other.get_unscaled_state(param, name), value)
    for one, own in ((optimizer, params), (other, others)):
        set_grads(own, 1, dtype=torch.float32)
        one.step()
    assert_identical(others, params)

    # Transformer Engine saves the value that such a parameter had at first; one that was rounded
    # takes the unrounded value.
    before = others[0].detach().clone()
    other.set_scaled_state(others[0], "master_param", torch.ones_like(before))
    assert torch.equal(others[0], before)
    others[0].data.copy_(before.bfloat16())
    other.set_scaled_state(others[0], "master_param", before)
    assert torch.equal(others[0], before)


@pytest.mark.parametrize(
    ("call", "match", "options"),
    [
        (lambda o, p: o.initialize_state(Parameter(p.data)), "must be parameters of this", {}),
        (lambda o, p: o.initialize_state(p, True), "must be that of the optimizer, got", {}),
        (lambda o, p: o.get_unscaled_state(p, "step"), "state_name must be one of exp_avg,", {}),
        (lambda o, p: o.get_unscaled_state(p, "exp_avg"), "must have a state to read exp_avg", {}),
        (lambda o, p: o.set_scaled_state(p, "exp_avg", torch.ones(3)), r"parameter, \(5,", {}),
        (lambda o, p: o.get_unscaled_state(p, "master_param"), "without a master", WITHOUT),
    ],
)
def test_misuse_changes_nothing(call, match, options):
    param = weights()[1]
    optimizer = FusedAdam([param], **options)
    with pytest.raises(ValueError, match=match):
        call(optimizer, param)
    assert not optimizer.state


# Checkpoints of Transformer Engine


def test_a_parameter_with_a_count_of_its_own_keeps_it():
    params = weights()
    optimizer = FusedAdam(params)
    take_steps(optimizer, [0])
    for param in params:  # at last a step of none
        param.grad = None
        optimizer.step()
        assert optimizer.param_groups[0]["step"] == 2
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["step"] == 2
    assert saved["state"][0]["step"] == 1 and "step" not in saved["state"][1]
    for kind in (FP4Adam, FusedAdam):
        resumed = kind(params)
        resumed.load_state_dict(saved)
        assert [resumed.state[param]["step"] for param in params] == [1, 2]
    assert resumed.param_groups[0]["step"] == 2


# Its layout


def narrow_pair(device="cpu", **options):
    params = weights(device)
    optimizer = FusedAdam([{"params": params}, {"params": []}], lr=1e-2, **options)
    take_steps(optimizer, range(3))
    return optimizer, params


def test_the_keyword_of_transformer_engine_gives_its_layout():
    """Megatron makes its optimizer with it, whatever the class is."""
    for options, shows_te in (({}, False), ({"adam_w_mode": True}, True)):
        optimizer = FP4Adam(weights(), exp_avg_dtype=torch.uint8, **options)
        take_steps(optimizer, [0])
        for each in (optimizer, copy.deepcopy(optimizer)):
            assert [group.get("step") for group in each.param_groups] == [1 if shows_te else None]
            for state in (*each.state.values(), *each.state_dict()["state"].values()):
                assert ("step" in {*state}) is not shows_te and "exp_avg_scale" not in {*state}


def test_groups_count_steps():
    optimizer, params = narrow_pair()  # with an empty group
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    assert all(type(group["step"]) is int for group in optimizer.param_groups)
    assert not any("step" in each for each in optimizer.compact_state_dict()["param_groups"])
    saved = optimizer.state_dict()
    assert [group["step"] for group in saved["param_groups"]] == [3, 3]
    optimizer.param_groups[0]["step"] = 7
    saved_now = optimizer.state_dict()["param_groups"]
    assert [group["step"] for group in saved_now + optimizer.param_groups] == [7] * 4
    take_steps(optimizer, [0])
    assert [optimizer.state[param]["step"] for param in params] == [8, 8]
    copied = copy.deepcopy(optimizer)
    copied.enable_gradient_release()
    for count in (9, 20, 21):  # one that is set is that of released steps once they are over
        for param in copied.param_groups[0]["params"]:
            WithGradient.apply(param, torch.ones(param.shape)).backward()
        copied.step()
        assert copied.param_groups[0]["step"] == count and optimizer.param_groups[0]["step"] == 8
        copied.param_groups[0]["step"] = max(count, 20)
    # A count that the device has taken back.
    optimizer.found_inf = torch.ones(1)
    take_steps(optimizer, [0])
    optimizer.enable_gradient_release().remove()
    assert optimizer.state[params[0]]["step"] == 8 and optimizer.param_groups[0]["step"] == 8
    optimizer.load_state_dict(saved)
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    optimizer.param_groups[0]["step"] = 0
    take_steps(optimizer, [0])
    assert optimizer.state[params[1]]["step"] == 0
    optimizer.param_groups[0]["step"] = -1
    with pytest.raises(ValueError, match="step of a group must be a number >= 0, got -1"):
        optimizer.step()


def test_groups_count_apart_and_those_without_a_count_show_the_largest():
    params = weights()
    optimizer = FusedAdam([{"params": [param]} for param in params] + [{"params": []}])
    assert "step" not in optimizer.state_dict()["param_groups"][0]
    optimizer.initialize_state(params[0])
    assert optimizer.state and "step" not in optimizer.param_groups[0]
    set_grads(params[:1], 0)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())  # with one state
    take_steps(optimizer, [0])
    assert [group["step"] for group in optimizer.param_groups] == [2, 1, 2]
    optimizer.initialize_state(params[0])
    for count in (1, 5):
        assert optimizer.state
        assert [group["step"] for group in optimizer.param_groups] == [0, count, count]
        optimizer.param_groups[1]["step"] = 5
    assert "step" not in optimizer.state_dict()["state"][1]


def test_states_are_a_dictionary_to_others():
    optimizer, params = narrow_pair(exp_avg_dtype=torch.uint8)
    states = optimizer.state
    assert len(states) == 2 and [*states] == params
    for param in params:
        states[param] = given = {name: value.clone() for name, value in states[param].items()}
        assert states[param]["exp_avg"] is given["exp_avg"]
    optimizer.state = states
    take_steps(optimizer, [3])
    assert [states[param]["step"] for param in params] == [4, 4]
    moment = torch.zeros_like(states[params[1]]["exp_avg_sq"])
    states[params[1]]["exp_avg_sq"] = moment
    take_steps(optimizer, [4])
    assert states[params[1]]["exp_avg_sq"] is moment and moment.any()
    del states[params[1]]["exp_avg_sq"]
    assert "exp_avg_sq" not in states[params[1]] and states.get(0) is None and 0 not in states
    with pytest.raises(KeyError):
        states.pop(0)
    state = states.pop(params[1])
    assert set(state) == {"exp_avg", "master_param"} and params[1] not in states
    assert len(states[params[1]]) == 0 and params[1] in states  # made anew
    assert "exp_avg" in repr(states)


@pytest.mark.parametrize("flat", [False, True])
def test_checkpoints_of_torch_distributed_keep_the_count_of_a_group(flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = quantize_model(torch.nn.Linear(64, 64).bfloat16(), "nvfp4")
    optimizer, resumed = (FusedAdam(model.parameters(), lr=1e-2) for _ in range(2))
    take_steps(optimizer, range(3))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    optimizer.zero_grad()
    set_optimizer_state_dict(model, resumed, saved, options=options)
    assert resumed.param_groups[0]["step"] == 3
    assert_identical(resumed.state_dict(), optimizer.state_dict())


# Keywords


def test_a_grad_scaler_can_be_passed_to_the_step():
    found = []
    for direct in (True, False):
        param = Parameter(random((8, 8), 0))
        optimizer, scaler = FusedAdam([param], lr=1e-2), torch.amp.GradScaler("cpu", init_scale=8.0)
        for value in (1.0, float("inf"), 2.0):
            scaler.scale((param * value).sum()).backward()
            optimizer.step(grad_scaler=scaler) if direct else scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append([param.detach(), optimizer.state_dict()["state"], scaler.get_scale()])
    assert_identical(*found)
    assert optimizer.step(lambda: 3.0, grad_scaler=torch.amp.GradScaler(enabled=False)) == 3.0
    with pytest.raises(TypeError, match="unexpected keyword argument 'grad_scalar'"):
        optimizer.step(grad_scalar=None)


@pytest.mark.parametrize("none", [True, False])
def test_set_grad_none_is_what_zero_grad_does(none):
    for kind in (FusedAdam, FP4Adam):
        params = weights()
        optimizer = kind(params, set_grad_none=none, use_decoupled_grad=True)
        for dtype in (None, torch.float32):
            set_grads(params, 0, dtype=dtype)
        with pytest.raises(ValueError, match=f"set_to_none must be {none} .* got {not none}"):
            optimizer.zero_grad(set_to_none=not none)
        optimizer.zero_grad()
        for grad in [grad for param in params for grad in (param.grad, param.decoupled_grad)]:
            assert grad is None if none else not grad.any()
        optimizer.zero_grad(none)
