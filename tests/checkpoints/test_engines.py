"""Weights handed to serving engines, whose method is replaced by one that records its calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fp4adam import export_tensors, quantize_model, update_sglang
from helpers import assert_identical


class Recorder:
    """Takes tensors as ``sglang.Engine`` does, and fails at the call number ``fails_at``."""

    def __init__(self, fails_at: int = -1) -> None:
        self.calls: list[tuple[list[tuple[str, Tensor]], bool]] = []
        self.fails_at = fails_at

    def update_weights_from_tensor(
        self, named_tensors: list[tuple[str, Tensor]], flush_cache: bool = True
    ) -> tuple[bool, str]:
        self.calls.append((list(named_tensors), flush_cache))
        return len(self.calls) != self.fails_at, "no such parameter"


class Sessions(Recorder):
    """As SGLang 0.5.23: takes tensors between two calls alone."""

    is_open = False

    def begin_weight_update(self) -> tuple[bool, str]:
        answer = not self.is_open, "a session is open"
        self.is_open = True
        return answer

    def end_weight_update(self) -> tuple[bool, str]:
        answer = self.is_open, "no session is open"
        self.is_open = False
        return answer

    def update_weights_from_tensor(
        self, named_tensors: list[tuple[str, Tensor]], flush_cache: bool = True
    ) -> tuple[bool, str]:
        if not self.is_open:
            return False, "must run between begin_weight_update() and end_weight_update()"
        return super().update_weights_from_tensor(named_tensors, flush_cache)


def exported() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = quantize_model(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)), "nvfp4")
    return dict(export_tensors(model))


@pytest.mark.parametrize("engine_class", [Recorder, Sessions])
@pytest.mark.parametrize("bucket_bytes", [1, 1100, 2**20])
def test_sglang_gets_every_tensor_once_and_flushes_at_the_end(bucket_bytes, engine_class):
    tensors, engine = exported(), engine_class()
    update_sglang(engine, tensors.items(), bucket_bytes)
    given = [item for bucket, _ in engine.calls for item in bucket]
    assert [name for name, _ in given] == list(tensors)
    assert_identical(dict(given), tensors)
    assert [flushes for _, flushes in engine.calls] == [False] * (len(engine.calls) - 1) + [True]
    for bucket, _ in engine.calls:
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= bucket_bytes


@pytest.mark.parametrize("engine_class", [Recorder, Sessions])
def test_what_sglang_refuses_is_raised(engine_class):
    engine = engine_class(fails_at=2)
    with pytest.raises(RuntimeError, match="must take 1 tensors from .* got: no such parameter"):
        update_sglang(engine, exported().items(), bucket_bytes=1)
    assert len(engine.calls) == 2
    update_sglang(engine, exported().items())  # the failed session is closed
    if isinstance(engine, Sessions):
        engine.is_open = True
        with pytest.raises(RuntimeError, match="must begin an update, got: a session is open"):
            update_sglang(engine, [])
    with pytest.raises(ValueError, match="bucket_bytes must be at least 1, got 0"):
        update_sglang(engine, [], bucket_bytes=0)
