"""Updates of an engine: equal to a full export, byte for byte, whatever is lost or restarted."""

import copy
import pickle
import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fp4adam import (
    Float8BlockQuantizer,
    FP4Adam,
    FusedAdam,
    MXFP4Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    UpdateLost,
    WeightReceiver,
    WeightSender,
    WeightUpdate,
    export_tensors,
    hf_scale_groups,
    post_all_gather_processing,
    quantize_master_weights,
    quantize_model,
)
from fp4adam.tensors import backend, changes
from fp4adam.tensors.storage import Storage
from ranks import all_ranks, run_ranks

LAYOUTS = {
    "nvfp4": "compressed-tensors",
    "mxfp8": "compressed-tensors",
    "mxfp4": "compressed-tensors",
    "float8block": "fp8",
}
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


def build(weights: str, lr: float = 1e-5, device: str = "cpu", **states: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 128), Block()).to(device, torch.bfloat16)
    groups = hf_scale_groups if weights == "nvfp4" else ()
    quantize_model(model, weights, scale_groups=groups)
    return model, FP4Adam(model.named_parameters(), lr=lr, scale_groups=groups or None, **states)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(64, (4, 16), generator=generator).to(model[0].weight.device)
    model(tokens).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_served(receiver: WeightReceiver, model: nn.Module, weights: str, fused: bool) -> None:
    expected = dict(export_tensors(model, LAYOUTS[weights], fused=fused))
    assert receiver.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        served = receiver.tensors[name]
        assert (served.dtype, served.shape) == (tensor.dtype, tensor.shape)
        raw = (t.contiguous().reshape(-1).view(torch.uint8) for t in (served, tensor))
        assert torch.equal(*raw), name


def sent(update: WeightUpdate) -> WeightUpdate:
    """As it comes out of another process."""
    return WeightUpdate.unpack(update.pack().clone())


def losing(kind: str, sender: WeightSender, receiver: WeightReceiver, draw: random.Random) -> None:
    """An update that does not arrive: never sent on, cut off on its way, or with a wrong bit."""
    packed = sender.export_changes().pack()
    if kind == "cut":
        packed = packed[: -draw.randrange(1, packed.numel())]
    elif kind == "damaged":
        packed[draw.randrange(packed.numel())] ^= 1 << draw.randrange(8)
    if kind != "lost":
        before = {name: t.clone() for name, t in receiver.tensors.items()}
        with pytest.raises((ValueError, UpdateLost)):
            receiver.apply(WeightUpdate.unpack(packed))
        assert all(
            torch.equal(t.view(torch.uint8), before[n].view(torch.uint8))
            for n, t in receiver.tensors.items()
        )


EVENTS = (
    *("lost", "cut", "damaged"),
    *("new receiver", "new sender", "second sender", "copied", "pickled"),
    *("overwritten", "codes", "loaded", "loaded states", "skipped"),
)
# Of a master in FP32, and of what completes the codes.
MASTERS = {"fp32 masters": {}, "int8 masters": dict(states="8bit")}


@every_format
@pytest.mark.parametrize("states", MASTERS.values(), ids=MASTERS)
@pytest.mark.parametrize("fused", [False, True])
def test_fifty_updates_with_losses_and_restarts(weights, states, fused):
    model, optimizer = build(weights, **states)
    options = dict(layout=LAYOUTS[weights], fused=fused)
    sender, receiver = WeightSender(model, **options), WeightReceiver()
    draw, sizes = random.Random(0), []
    successor = None
    # Each event three times or more, each with others before and after it.
    events = [*EVENTS * 3, *["none"] * (50 - 3 * len(EVENTS))]
    draw.shuffle(events)
    for step, event in enumerate(events):
        may_lose = event in ("lost", "cut", "damaged", "new receiver", "new sender")
        if successor is not None:  # it has recorded since it took over
            sender, successor, may_lose = successor, None, True
        for _ in range(draw.choice((0, 1, 1, 2))):
            train(model, optimizer, step)
        weight = model[1].o_proj.weight
        if event in ("lost", "cut", "damaged"):
            losing(event, sender, receiver, draw)
        elif event == "new receiver":
            receiver = WeightReceiver()
        elif event == "new sender":
            sender.close()
            sender = WeightSender(model, **options)
        elif event == "second sender":
            successor = WeightSender(model, **options)
            successor.export_changes()
        elif event in ("copied", "pickled"):
            # As a trainer does that goes on from a checkpoint; what was there before goes on, too.
            pair = (model, sender)
            is_pickled = event == "pickled"
            _, other = pickle.loads(pickle.dumps(pair)) if is_pickled else copy.deepcopy(pair)
            assert other.export_changes().is_full
            with pytest.raises(UpdateLost):
                receiver.apply(other.export_changes())
        elif event == "overwritten":
            with torch.no_grad():
                weight.copy_(torch.randn(128, 128))
                model[1].norm.weight.mul_(1.5)
        elif event == "codes":
            weight.rowwise_data.view(-1)[:7] ^= 3
        elif event == "loaded":
            state = copy.deepcopy(model.state_dict())
            train(model, optimizer, step)
            model.load_state_dict(state)
        elif event == "loaded states":
            state = copy.deepcopy(optimizer.state_dict())
            train(model, optimizer, step)
            optimizer.load_state_dict(state)
        elif event == "skipped":
            optimizer.grad_scale = optimizer.found_inf = torch.ones(1)  # as GradScaler does
            train(model, optimizer, step)
            optimizer.grad_scale = optimizer.found_inf = None
        if event in ("overwritten", "codes", "loaded") and draw.random() < 0.5:
            train(model, optimizer, step)  # from what has been written
        update = sent(sender.export_changes())
        try:
            receiver.apply(update)
        except UpdateLost:
            assert may_lose
            update = sent(sender.export_changes(full=True))
            receiver.apply(update)
        sizes.append(update.nbytes)
        assert_served(receiver, model, weights, fused)
    # The others carried what had changed: less after steps alone than after what wrote all.
    assert sum(size == max(sizes) for size in sizes) < 25
    assert sum(size < 0.6 * max(sizes) for size in sizes) > 15


@pytest.mark.parametrize(
    ("weights", "kernels"),
    [(weights, kernels) for weights in LAYOUTS for kernels in (False, True)],
)
def test_only_what_has_changed_is_sent(weights, kernels, monkeypatch, device):
    if kernels:
        pytest.importorskip("triton")
        monkeypatch.setattr(backend, "uses_kernels", lambda d: d.type == device)
    model, optimizer = build(weights, lr=1e-5, device=device if kernels else "cpu")
    train(model, optimizer, 2)  # from BF16 numbers, many of which lie between two codes
    sender, receiver = WeightSender(model, LAYOUTS[weights]), WeightReceiver()
    first = sender.export_changes()
    receiver.apply(first)
    assert first.is_full and first.positions.numel() == 0
    whole = sum(t.nbytes for _, t in export_tensors(model, LAYOUTS[weights]))
    assert first.nbytes == whole
    nothing = sender.export_changes()
    assert not nothing.is_full and nothing.positions.numel() == 0
    receiver.apply(nothing)
    train(model, optimizer, 0)
    update = sender.export_changes()
    assert 0 < update.positions.numel() and update.nbytes < 0.7 * whole
    receiver.apply(update)
    assert_served(receiver, model, weights, fused=False)
    # Flags say just what differs.
    before = {name: t.clone() for name, t in receiver.tensors.items()}
    train(model, optimizer, 1)
    update = sender.export_changes()
    receiver.apply(update)
    differing: dict[int, Tensor] = {}
    for part in first.parts:
        if part.unit:
            old, new = (
                t[part.name].reshape(-1).view(torch.uint8).view(-1, part.unit)
                for t in (before, receiver.tensors)
            )
            units = (old != new).any(1)
            differing[part.matrix] = units | differing.get(part.matrix, units)
    counts = [int(differing[i].sum()) if i in differing else 0 for i in range(len(update.counts))]
    assert [*update.counts] == counts and sum(counts) > 0


@pytest.mark.parametrize(
    ("quantizer", "shape"),
    [
        # Edges in both directions: sides are no multiples of those of large tiles.
        (NVFP4Quantizer(), (96, 160)),
        (NVFP4Quantizer(two_dimensional=False), (96, 160)),
        (NVFP4Quantizer(adaptive="mse", columnwise=False), (96, 160)),
        (MXFP8Quantizer(), (96, 160)),
        (MXFP8Quantizer(two_dimensional=True, optimize_for_gemm=True), (96, 160)),
        (MXFP4Quantizer(), (96, 160)),
        # Whole blocks and such with masks, of aligned rows and of others.
        (Float8BlockQuantizer(), (160, 192)),
        (Float8BlockQuantizer(), (136, 140)),
        (Float8BlockQuantizer(columnwise=False, force_pow_2_scales=False), (128, 160)),
        (Float8BlockQuantizer(two_dimensional=False), (136, 160)),
        (Float8BlockQuantizer(two_dimensional=False, columnwise=False), (128, 128)),
    ],
    ids=str,
)
@pytest.mark.parametrize("master", [torch.float32, torch.int8], ids=str)
def test_kernels_flag_what_operators_flag(quantizer, shape, master, monkeypatch, device):
    pytest.importorskip("triton")
    flags = {}
    for kernels in (False, True):
        monkeypatch.setattr(backend, "uses_kernels", lambda d, on=kernels: on and d.type == device)
        values = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
        weight = nn.Parameter(quantizer.quantize(values.to(device if kernels else "cpu")))
        optimizer = FP4Adam([weight], lr=0.1, master_weight_dtype=master)
        record = changes.ChangeRecord(
            weight,
            torch.empty(changes.number_of_units(weight), dtype=torch.uint8, device=weight.device),
        )
        for step in range(2):
            record.clear()
            # Some rows move, others stay.
            grad = values.roll(step, 0).masked_fill(torch.arange(len(values))[:, None] % 3 > 0, 0)
            weight.grad = grad.to(weight.device)
            optimizer.step()
            assert record.is_right_for(weight)
            flags[kernels, step] = record.flags.cpu().clone()
        record.detach()
    for step in range(2):
        assert torch.equal(flags[True, step], flags[False, step])
        assert 0 < int(flags[True, step].sum()) < 0.9 * flags[True, step].numel()


def test_a_newer_sender_takes_over():
    model, optimizer = build("nvfp4")
    older, receiver = WeightSender(model), WeightReceiver()
    receiver.apply(older.export_changes())
    WeightSender(model).export_changes()
    train(model, optimizer, 0)
    receiver.apply(older.export_changes())
    assert_served(receiver, model, "nvfp4", fused=False)


def test_the_engine_s_own_tensors_are_written_in_place():
    model, optimizer = build("nvfp4")
    sender = WeightSender(model)
    own = {name: torch.empty_like(t) for name, t in export_tensors(model)}
    addresses = {name: t.data_ptr() for name, t in own.items()}
    receiver = WeightReceiver(own)
    for step in range(3):
        receiver.apply(sender.export_changes())
        train(model, optimizer, step)
    receiver.apply(sender.export_changes())
    assert {name: t.data_ptr() for name, t in receiver.tensors.items()} == addresses
    assert_served(receiver, model, "nvfp4", fused=False)
    own["1.norm.weight"] = own["1.norm.weight"].float()
    with pytest.raises(ValueError, match=r"tensors must have '1.norm.weight', contiguous torch.bf"):
        WeightReceiver(own).apply(sender.export_changes(full=True))
    del own["1.norm.weight"]
    with pytest.raises(ValueError, match="got none; pass the engine's tensors"):
        WeightReceiver(own).apply(sender.export_changes(full=True))


def test_damaged_and_foreign_updates_change_nothing():
    model, optimizer = build("nvfp4")
    sender, receiver = WeightSender(model), WeightReceiver()
    with pytest.raises(UpdateLost, match="the last one that was applied, none, got 1"):
        sender.export_changes()
        receiver.apply(sender.export_changes())
    receiver.apply(sender.export_changes(full=True))
    before = {name: t.clone() for name, t in receiver.tensors.items()}
    train(model, optimizer, 0)
    update = sender.export_changes()
    packed = update.pack()
    packed[-1] ^= 1
    with pytest.raises(ValueError, match="another checksum"):
        receiver.apply(WeightUpdate.unpack(packed))
    packed[-1] ^= 1
    for at in range(8 + int(packed[0]) + 256 * int(packed[1])):  # all of the header
        packed[at] ^= 1
        with pytest.raises(ValueError, match="packed must be the tensor of an update"):
            WeightUpdate.unpack(packed)
        packed[at] ^= 1
    swapped = update.payload.clone()
    swapped[:16], swapped[16:32] = update.payload[16:32], update.payload[:16].clone()
    if not torch.equal(swapped, update.payload):
        with pytest.raises(ValueError, match="another checksum"):
            receiver.apply(update._replace(payload=swapped))
    with pytest.raises(ValueError, match="packed must be the tensor of an update"):
        WeightUpdate.unpack(packed[20:])
    other = WeightSender(model)
    other.export_changes()
    with pytest.raises(UpdateLost, match="of another sender"):
        receiver.apply(other.export_changes())
    assert all(torch.equal(before[name], t) for name, t in receiver.tensors.items())
    receiver.apply(update)


def test_refused():
    model, _ = build("nvfp4")
    with pytest.raises(ValueError, match="layout must be one of .* for WeightSender, got 'gguf'"):
        WeightSender(model, "gguf")


def serve_replicas(rank: int, weights: str) -> None:
    """Ranks with gradients of their own: DDP, and masters spread over the ranks."""
    model, optimizer = build(weights, lr=1e-3)
    replica = nn.parallel.DistributedDataParallel(model)
    sender, receiver = WeightSender(replica, LAYOUTS[weights]), WeightReceiver()
    for _ in range(3):
        receiver.apply(sent(sender.export_changes()))
        assert_served(receiver, model, weights, fused=False)
        tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(rank))
        replica(tokens).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    update = sender.export_changes()
    assert 0 < update.positions.numel()
    receiver.apply(update)
    assert_served(receiver, model, weights, fused=False)
    checksums = [None, None]
    dist.all_gather_object(checksums, update.checksum)
    assert checksums[0] == checksums[1]
    # What Megatron does: each rank quantizes its half, and all get the codes of all.
    weight = model[1].o_proj.weight
    master = weight.dequantize(torch.float32) * 1.5
    half = master.numel() // 2
    own = master.view(-1)[rank * half : (rank + 1) * half].clone()
    quantize_master_weights(
        [weight], [own], [rank * half], None, manual_post_all_gather_processing=True
    )
    halves = weight.rowwise_data.view(-1).chunk(2)
    dist.all_gather([*halves], halves[rank].clone())
    post_all_gather_processing([weight])
    receiver.apply(sent(sender.export_changes()))
    assert_served(receiver, model, weights, fused=False)


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp8", "float8block"])
def test_every_rank_of_a_replica_sends_the_same(weights):
    run_ranks(serve_replicas, 2, weights)


def refuse_shards(rank: int) -> None:
    model, optimizer = build("nvfp4")
    sender = WeightSender(model)
    sender.export_changes()
    fully_shard(model, mesh=all_ranks())
    words = r"on one process for WeightSender, got '0.weight', a DTensor; send export_tensors\("
    with pytest.raises(NotImplementedError, match=words):
        WeightSender(model)
    with pytest.raises(NotImplementedError, match=words):
        sender.export_changes()
    whole, _ = build("nvfp4")
    expected = dict(export_tensors(whole))
    for name, tensor in export_tensors(model):  # what the error says to send
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


def test_shards_are_refused_on_every_rank():
    run_ranks(refuse_shards, 2)


def test_replays_of_graphs_are_never_missed(device, monkeypatch):
    """A CUDA graph writes weights when no Python runs, and they have the versions they had."""
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "uses_kernels", lambda d: d.type == device)
    model, optimizer = build("nvfp4", lr=1e-3, device=device)
    plain = FusedAdam(model[1].norm.parameters(), lr=1e-3, capturable=True)
    sender, receiver = WeightSender(model), WeightReceiver()
    norm = model[1].norm.weight
    for _ in range(2):
        train(model, optimizer, 0)
        norm.grad = torch.ones_like(norm)
        plain.step()
        receiver.apply(sender.export_changes())
    # A replay, seen from here: the flags that kernels had at the capture, and no new version.
    version = norm._version
    norm.view(torch.int16).data.add_(1)
    assert norm._version == version
    receiver.apply(sender.export_changes())
    assert_served(receiver, model, "nvfp4", fused=False)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(
    "quantizer", [NVFP4Quantizer(), MXFP8Quantizer(), MXFP4Quantizer()], ids=str
)
def test_changes_of_scales_alone_are_flagged(quantizer, kernels, monkeypatch, device):
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "uses_kernels", lambda d: kernels and d.type == device)
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    weight, larger = (nn.Parameter(quantizer.quantize(v)) for v in (values, 8 * values))
    # The larger one holds the amax of both, where tensors have one, and stays.
    groups = [["weight", "larger"]] if isinstance(quantizer, NVFP4Quantizer) else None
    named = [
        {"params": [("weight", weight)], "weight_decay": 0.5},
        {"params": [("larger", larger)], "weight_decay": 0.0},
    ]
    optimizer = FP4Adam(named, lr=1.0, scale_groups=groups)
    record = changes.ChangeRecord(weight, torch.empty(128, dtype=torch.uint8, device=device))
    for _ in range(2):
        codes = weight.rowwise_data.clone()
        record.clear()
        weight.grad, larger.grad = torch.zeros_like(values), torch.zeros_like(values)
        optimizer.step()  # halves the weight
    assert torch.equal(weight.rowwise_data, codes)
    assert record.is_right_for(weight) and record.flags.all()
    inner = {name: x.clone() for name, x in weight._shared.tensors.existing().items()}
    weight._shared.tensors = Storage(**inner)  # each inner tensor has a version of its own
    record.clear()
    weight._shared.tensors.present[-1].add_(0)
    assert not record.is_right_for(weight)
    record.detach()
