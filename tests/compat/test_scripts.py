"""Training loops with the calls of real scripts: losses fall, and a saved and loaded run continues with the same bits.

Also eval/originals.py and eval/compat.sh, which run the scripts of other projects.
"""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

import pytest

from eval import originals
from tests.compat import work_scripts as work
from tests.parallel.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def check_losses_and_resume(results: list[tuple[list[list[float]], bool]]) -> None:
    """results: [rank] (losses of the first and of the last epoch, whether the resumed run has the same bits)."""
    for (first, last), same_bits in results:
        assert mean(last[-4:]) < 0.8 * mean(first[:4]) and same_bits


@pytest.mark.sampled(one=["kind"])
@pytest.mark.parametrize("kind", ["cnn", "transformer", "gpt2"])
def test_decent_dps_experiments_train_and_resume(kind: str) -> None:
    check_losses_and_resume(run_ranks(2, work.train_decent_dp_experiment, kind))


@pytest.mark.sampled(one=["kind"])
@pytest.mark.parametrize("kind", ["readme", "test"])
def test_decent_dps_own_loops_train_and_resume(kind: str) -> None:
    check_losses_and_resume(run_ranks(2, work.train_decent_dp_loop, kind))


@pytest.mark.sampled(one=["name"])
@pytest.mark.parametrize("name", ["EASGD", "EASGD+", "LSGD", "LSGD+", "DataParallel"])
def test_sdtls_main_loop_trains_and_resumes(name: str) -> None:
    check_losses_and_resume(run_ranks(2, work.train_sdtl_loop, name))


@pytest.mark.slow
def test_a_script_for_gpus_runs_without_one(tmp_path: Path) -> None:
    """The environment of eval/originals.py replaces what is missing: the rank's device, NCCL's mean, absent
    packages."""
    (tmp_path / "train.py").write_text(
        "import subprocess, torch, torchvision, torchvision.transforms as transforms\n"
        "import torch.distributed as dist\nfrom nvidia.dali.plugin.pytorch import DALIClassificationIterator\n"
        "from decent_dp.ddp import DecentralizedDataParallel as DecentDP\nfrom DistOptimizers import CommOptimizer\n"
        "from decent_dp.utils import initialize_dist\nfrom decent_dp.optim import optim_fn_adam\n"
        "assert torch.cuda.is_available() and b'GPU' in subprocess.check_output('nvidia-smi -L', shell=True)\n"
        "rank, n = initialize_dist()\nassert (dist.get_backend(), rank, n) == ('gloo', 0, 1)\n"
        "total = torch.tensor([5, 4]).cuda()\ndist.all_reduce(total, op=dist.ReduceOp.AVG)\n"
        "digits = torchvision.datasets.MNIST(root='.', train=False, download=True, transform=transforms.ToTensor())\n"
        "x = torch.stack([digits[i][0] for i in range(4)]).pin_memory().to('cuda:0', non_blocking=True)\n"
        "model = DecentDP(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 1)).cuda(), optim_fn_adam)\n"
        "model(x).sum().backward()\nprint(total.tolist(), list(x.shape), x.device, model.steps)\n"
    )
    process = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100,
                             env=originals.environment() | {"RANK": "0", "WORLD_SIZE": "1"})  # fmt: skip
    assert process.stdout.strip() == "[5, 4] [4, 1, 28, 28] cpu 1", process.stderr


@pytest.mark.slow
def test_a_path_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    script = str(ROOT / "eval/originals.py")
    for words, message in (((f"--experiments={tmp_path}",), "there is no"), (("--only", "cnn"), "give the path")):
        process = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, timeout=100)
        assert process.returncode == 2 and message in process.stderr and "Traceback" not in process.stderr


@pytest.mark.slow
def test_ctrl_c_ends_the_script_and_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test.py").write_text(
        f"import os, time\nopen('{tmp_path}/' + os.environ['RANK'], 'w').write(str(os.getpid()))\ntime.sleep(300)\n"
    )
    command = [sys.executable, str(ROOT / "eval/originals.py"), "--decent-dp", str(tmp_path)]
    # the process that runs the tests may ignore SIGINT, and its children would inherit that
    restore_sigint = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=restore_sigint)
    pid_files = [tmp_path / rank for rank in "01"]
    deadline = time.monotonic() + 100
    while not all(file.exists() and file.read_text() for file in pid_files):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 130 and stderr.strip() == "stopped"
    assert not any(Path(f"/proc/{file.read_text()}").exists() for file in pid_files)


@pytest.mark.slow
def test_compat_sh_runs_a_script_with_nothing_but_its_import_changed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys\nfrom decent_dp.ddp import DecentralizedDataParallel as ddp\n"
        "from decent_dp.utils import initialize_dist\nfrom decent_dp.topo import TopologyReg\n"
        "print(initialize_dist(), ddp.__module__, sorted(TopologyReg.registry), sys.argv[1:], flush=True)\n"
    )
    command = ["bash", str(ROOT / "eval/compat.sh"), "--decent-dp", str(tmp_path), "--ranks", "1"]
    process = subprocess.run([*command, "--script", "train.py", "word"], capture_output=True, text=True, timeout=100)
    assert "(0, 1) decentnode.compat.decent_dp.wrapper" in process.stdout, process.stderr
    assert "['word']" in process.stdout, process.stderr
    refused = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert refused.returncode == 2 and "there is no" in refused.stderr
