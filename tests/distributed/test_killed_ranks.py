"""Ranks that are killed in the middle of a load, a step or a checkpoint."""

import pytest

from killed_ranks import STAGES, campaign


@pytest.mark.exhaustive
def test_the_last_checkpoint_resumes_after_a_kill():
    found = campaign([*STAGES], seed=1)
    assert len(found) == len(STAGES)
    # Those that waited for the killed rank say so.
    errors = [error for row in found for error in row["error of each"] if error is not None]
    assert errors and all("onnection" in error or "ailed" in error for error in errors), errors
