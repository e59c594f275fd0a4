"""decentnode.compat with models on GPUs: the steps of Decent-DP and SDTL."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compat import work_decent_dp as decent
from tests.compat import work_scripts, work_sdtl
from tests.compat.test_scripts import check_losses_and_resume
from tests.gpu.test_ranks import BACKENDS, on_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("options", "average", "hooked"), [
    ({}, 3, True), ({"faithful": True}, 3, False), ({"faithful": True, "transport": "collective"}, 2, True),
    ({"faithful": True, "grad_clip_norm": decent.CLIP, "bucket_size_in_mb": 0}, 0, False),
], ids=["default, hooked", "faithful", "faithful, hooked", "faithful, clipped"])  # fmt: skip
def test_steps_equal_the_simulation_of_decent_dp(options: dict[str, Any], average: int, hooked: bool) -> None:
    expected = decent.simulate(8, average, "faithful" in options, clipped="grad_clip_norm" in options)
    results = on_gpus(4, "gloo", decent.train, options, 8, average, hooked)
    for rank, (parameters, hook_calls, _) in enumerate(results):
        assert parameters == pytest.approx(expected[rank], abs=2e-6) and bool(hook_calls) == hooked


@pytest.mark.parametrize(("options", "average", "passes", "evaluates"), [
    ({"faithful": True}, 3, 1, False), ({"faithful": True}, 0, 3, False), ({}, 0, 3, True),
    ({"faithful": True, "param_as_bucket_view": False}, 0, 1, True),
], ids=["faithful", "faithful, accumulating", "default, accumulating", "faithful, evaluating"])  # fmt: skip
def test_steps_over_edges_with_uneven_weights_equal_the_simulation(
    options: dict[str, Any], average: int, passes: int, evaluates: bool
) -> None:
    expected = decent.simulate(7, average, "faithful" in options, topology=decent.UnevenWeights, passes=passes)
    results = on_gpus(4, "gloo", decent.train, options, 7, average, False, decent.UnevenWeights, passes, evaluates)
    for rank, (parameters, _, _) in enumerate(results):
        assert parameters == pytest.approx(expected[rank], abs=2e-6)


@pytest.mark.parametrize(("average", "at"), [(0, 1), (0, 5), (3, 5)])
def test_a_faithful_run_is_resumed_with_the_same_bits(average: int, at: int) -> None:
    for differences in on_gpus(4, "gloo", decent.resume_and_compare, average, at):
        assert differences == {name: [0.0] * 5 for name in differences} and differences


@pytest.mark.parametrize(("n", "backend"), BACKENDS)
@pytest.mark.parametrize("kind", ["cnn", "gpt2"])
def test_decent_dps_experiments_train_and_resume(n: int, backend: str, kind: str) -> None:
    check_losses_and_resume(on_gpus(n, backend, work_scripts.train_decent_dp_experiment, kind))


@pytest.mark.parametrize(("n", "backend"), BACKENDS)
@pytest.mark.parametrize("name", ["EASGD+", "LSGD"])
def test_sdtls_main_loop_trains_and_resumes(n: int, backend: str, name: str) -> None:
    check_losses_and_resume(on_gpus(n, backend, work_scripts.train_sdtl_loop, name))


def test_faithful_methods_equal_sdtls_and_are_resumed_with_the_same_bits() -> None:
    for rank, results in enumerate(on_gpus(3, "gloo", work_sdtl.train)):
        for name, (whole, resumed) in results.items():
            assert whole == pytest.approx(work_sdtl.simulate(name)[rank], abs=1e-5) and resumed == whole
