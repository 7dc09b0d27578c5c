"""Do the sampler and the trainer agree, before and after updates and syncs? (tests/parity.py)"""

import json

import pytest

from tasks import chain
from tests.conftest import call


def check_parity(*options, ranks=2, limit=1e-4):
    result = call("-m", "tests.parity", *options, ranks=ranks)
    found = json.loads(next(line for line in result.stdout.splitlines() if line[:1] == "{"))
    assert found["start"] < limit and all(gap < limit for gap in found["synced"]), found
    assert all(gap > 0.01 for gap in found["stale"]), found  # the measure can tell
    assert all(0 < norm < 1000 for norm in found["grad_norm"]), found
    assert found["stopped"] > 0
    assert found["tokens"] > 10_000
    if "--model" not in options:  # the embedded tokenizer, whose embeddings may be padded
        assert found["largest"] == len(chain.make_tokenizer()) - 1
    assert found["reproducible"] and found["distinct"]
    assert found["empty"] == [] and found["few"] == 2


@pytest.mark.slow
def test_sampler_and_trainer_agree_before_and_after_updates():
    check_parity("--tied", "--padding", "30", "--zero-stage", "2")
