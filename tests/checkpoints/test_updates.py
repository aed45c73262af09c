"""Updates of an engine: equal to a full export, byte for byte, whatever is lost or restarted."""

import copy
import pickle
import random

import pytest
import torch
import torch.distributed as dist
from test_export import LAYOUT_OF
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fp4adam import (
    FP4Adam,
    UpdateLost,
    WeightReceiver,
    WeightSender,
    WeightUpdate,
    export_tensors,
    hf_scale_groups,
    quantize_model,
)
from helpers import assert_identical, bits
from ranks import all_ranks, run_ranks

LAYOUTS = LAYOUT_OF | {"mxfp4": "compressed-tensors"}
every_format = pytest.mark.parametrize("weights", LAYOUTS)


class Block(nn.Module):
    """Layers that engines fuse, others, and parameters in high precision."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(128, 128, bias=name == "o_proj"))
        self.norm = nn.RMSNorm(128)
        self.scale = nn.Parameter(torch.ones(3))  # no whole unit

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.o_proj(self.q_proj(x) + self.k_proj(x) * self.v_proj(x)) * self.scale.sum()


def build(weights: str, lr: float = 1e-5, shards: bool = False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 128), Block()).to(torch.bfloat16)
    groups = hf_scale_groups if weights == "nvfp4" else ()
    quantize_model(model, weights, scale_groups=groups)
    if shards:
        fully_shard(model[1], mesh=all_ranks())  # and the first weight is whole
    return model, FP4Adam(model.named_parameters(), lr=lr, scale_groups=groups or None)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    model(torch.randint(64, (4, 16), generator=generator)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def sent(update: WeightUpdate) -> WeightUpdate:
    """As it comes out of another process."""
    return WeightUpdate.unpack(update.pack().clone())


def spoil(kind: str, update: WeightUpdate, receiver: WeightReceiver, draw: random.Random) -> None:
    """An update that does not arrive: never sent on, cut off on its way, or with a wrong bit."""
    packed = update.pack()
    if kind == "cut":
        packed = packed[: -draw.randrange(1, packed.numel())]
    elif kind == "damaged":
        for at in draw.sample(range(packed.numel()), draw.choice((1, 2))):
            packed[at] ^= 1 << draw.randrange(8)
    if kind != "lost":
        with pytest.raises(ValueError, match="packed must be what pack"):
            receiver.apply(WeightUpdate.unpack(packed))


def overwrite(event: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write weights by something else than a step."""
    weight, norm = model[1].o_proj.weight, model[1].norm.weight
    if event == "copied into":
        with torch.no_grad():
            weight.copy_(torch.randn(128, 128))
    elif event == "unseen":  # as by the replay of a CUDA graph: no version tells
        norm.view(torch.int16).data.add_(1)
    elif event == "codes":
        weight.rowwise_data.view(-1)[:7] ^= 3
    elif event == "loaded":
        state = copy.deepcopy(model.state_dict())
        train(model, optimizer, 0)
        model.load_state_dict(state)


LOSSES = ("lost", "cut", "damaged", "new receiver", "new sender", "error")
WRITES = ("copied into", "unseen", "codes", "loaded")
OTHERS = ("second sender", "copied", "pickled", "none")


@every_format
def test_updates_with_losses_and_restarts(weights):
    model, optimizer = build(weights)
    options = dict(layout=LAYOUTS[weights])
    sender, receiver = WeightSender(model, **options), WeightReceiver()
    receiver.apply(sender.export_changes())
    draw, sizes = random.Random(0), []
    events = (LOSSES + WRITES + OTHERS) * 2
    for step, event in enumerate(draw.sample(events, len(events))):
        train(model, optimizer, step)
        if event in ("lost", "cut", "damaged"):
            spoil(event, sender.export_changes(), receiver, draw)
            train(model, optimizer, step)
        elif event == "new receiver":
            receiver = WeightReceiver()
        elif event == "new sender":
            sender = WeightSender(model, **options)
            sender.export_changes()
        elif event == "error":  # in the middle of an export: what was kept has not been sent
            with pytest.MonkeyPatch.context() as patch, pytest.raises(IndexError):
                failing = [sender._change] * 3
                patch.setattr(sender, "_change", lambda *each, left=failing: left.pop()(*each))
                sender.export_changes()
        elif event == "second sender":
            WeightSender(model, **options).export_changes()
        elif event in ("copied", "pickled"):
            # As a trainer does that goes on from a checkpoint; what was there before goes on, too.
            pair = model, sender
            is_pickled = event == "pickled"
            _, other = pickle.loads(pickle.dumps(pair)) if is_pickled else copy.deepcopy(pair)
            other.export_changes()
            train(model, optimizer, step)
            with pytest.raises(UpdateLost):
                receiver.apply(other.export_changes())
        overwrite(event, model, optimizer)
        update = sent(sender.export_changes())
        try:
            receiver.apply(update)
        except UpdateLost:
            assert event in LOSSES
            update = sent(sender.export_changes(full=True))
            receiver.apply(update)
        sizes.append(update.nbytes)
        assert_identical(receiver.tensors, dict(export_tensors(model, LAYOUTS[weights])))
    assert sum(size < 0.6 * max(sizes) for size in sizes) > len(events) / 3


@every_format
def test_only_what_has_changed_is_sent(weights):
    model, optimizer = build(weights)
    train(model, optimizer, 2)  # from BF16 numbers, many of which lie between two codes
    sender, receiver = WeightSender(model, LAYOUTS[weights], device="cpu"), WeightReceiver()
    first = sender.export_changes()
    assert receiver.apply(first) == [name for name, _ in export_tensors(model, LAYOUTS[weights])]
    elsewhere = WeightReceiver(device="meta")
    assert all(elsewhere.tensors[name].is_meta for name in elsewhere.apply(first))
    assert first.is_full and all(change.positions is None for change in first.changes)
    assert first.nbytes == sum(t.nbytes for t in receiver.tensors.values())
    nothing = sender.export_changes()
    assert not nothing.is_full and nothing.nbytes == 0 and receiver.apply(nothing) == []
    before = {name: bits(t).clone() for name, t in receiver.tensors.items()}
    train(model, optimizer, 0)
    update = sender.export_changes()
    assert 0 < update.nbytes < 0.7 * first.nbytes
    receiver.apply(update)
    counts = {change.name: len(change.positions) for change in update.changes}
    for name, old in before.items():
        unit = min(16, old.numel() & -old.numel())  # the largest power of 2 in it
        differs = (old != bits(receiver.tensors[name])).view(-1, unit).any(1)
        assert counts.get(name, 0) == int(differs.sum())


def test_a_model_that_is_stored_otherwise_is_sent_whole():
    model, _ = build("mxfp8")
    sender, receiver = WeightSender(model), WeightReceiver()
    receiver.apply(sender.export_changes())
    model[1].norm.float()
    update = sender.export_changes()
    assert [change.name for change in update.changes] == ["1.norm.weight"] and not update.is_full
    receiver.apply(sent(update))  # of one tensor
    assert_identical(receiver.tensors, dict(export_tensors(model)))
    for change in (lambda: model[1].norm.bfloat16(), lambda: model.append(nn.RMSNorm(128))):
        change()
        receiver.apply(sender.export_changes())
        assert_identical(receiver.tensors, dict(export_tensors(model)))


def test_the_engine_s_own_tensors_are_written_in_place():
    model, optimizer = build("nvfp4")
    sender = WeightSender(model)
    own = {name: torch.empty_like(t) for name, t in export_tensors(model)}
    addresses = {name: t.data_ptr() for name, t in own.items()}
    receiver = WeightReceiver(own)
    receiver.apply(sender.export_changes())
    train(model, optimizer, 0)
    receiver.apply(sender.export_changes())
    assert {name: t.data_ptr() for name, t in receiver.tensors.items()} == addresses
    assert_identical(receiver.tensors, dict(export_tensors(model)))
    own["1.norm.weight"] = own["1.norm.weight"].float()
    with pytest.raises(ValueError, match=r"tensors must have '1.norm.weight', contiguous torch.bf"):
        WeightReceiver(own).apply(sender.export_changes(full=True))
    del own["1.norm.weight"]
    with pytest.raises(ValueError, match="got none; pass the engine's tensors"):
        WeightReceiver(own).apply(sender.export_changes(full=True))


def test_refused_updates_change_nothing():
    model, optimizer = build("nvfp4")
    sender, receiver = WeightSender(model), WeightReceiver()
    receiver.apply(sender.export_changes())
    before = {name: t.clone() for name, t in receiver.tensors.items()}
    train(model, optimizer, 0)
    update = sender.export_changes()
    with pytest.raises(UpdateLost, match="must follow the last one that was applied"):
        WeightReceiver().apply(update)
    with pytest.raises(ValueError, match="model must have quantized weights"):
        WeightSender(nn.Linear(64, 64))
    assert_identical(receiver.tensors, before)
    receiver.apply(update)
    assert_identical(receiver.tensors, expected := dict(export_tensors(model)))
    full, expected = sender.export_changes(full=True), copy.deepcopy(expected)
    train(model, optimizer, 1)  # what has been exported stays
    receiver.apply(full)
    assert_identical(receiver.tensors, expected)


def serve_ranks(rank: int, weights: str, shards: bool) -> None:
    """Replicas send the same on each rank; of shards the first rank sends all."""
    model, optimizer = build(weights, lr=1e-3, shards=shards)
    trained = model if shards else nn.parallel.DistributedDataParallel(model)
    sender, receiver = WeightSender(trained, LAYOUTS[weights]), WeightReceiver()
    for step in range(3):
        update = sender.export_changes()
        expected = dict(export_tensors(model, LAYOUTS[weights]))
        if shards and rank:
            assert update is None and not sender._sent
        else:
            assert update.is_full == (step == 0)
            receiver.apply(sent(update))
            assert_identical(receiver.tensors, expected)
        train(trained, optimizer, 2 * step + rank)
    if not shards:
        updates: list = [None, None]
        dist.all_gather_object(updates, sender.export_changes().changes)
        assert_identical(*updates)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("weights", ["nvfp4", "float8block"])
def test_ranks(weights, shards):
    run_ranks(serve_ranks, 2, weights, shards)
