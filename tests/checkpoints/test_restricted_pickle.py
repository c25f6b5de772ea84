"""Pickles that execute code are rejected in every form, by the check and where DeepSpeed loads them."""

import io
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from dschat.checkpoints.restricted_pickle import pickle_problems, restricted_unpickling


class MakesFolder:
    """Its pickle creates a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


class EvaluatesCode(MakesFolder):
    def __reduce__(self):
        return eval, (f"__import__('os').mkdir({self.folder!r})",)


def in_an_archive(content: bytes) -> bytes:
    """The zip archive that torch.save writes, around any bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def in_a_tar(content: bytes) -> bytes:
    """The format of torch 0.1."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("storages", "tensors", "pickle"):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def saved(content: object, **options: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


# posix.mkdir, with the name computed on the stack, so that a scan of the opcodes' arguments does not find it.
COMPUTED = b"\x80\x04\x8c\x05posix\x94\x8c\x05mkdir\x940h\x00h\x01\x93\x8c\x01x\x85R."

DISGUISES = {
    "beside a tensor": lambda folder: saved({"weight": torch.ones(2), "x": MakesFolder(folder)}),
    "eval": lambda folder: saved([EvaluatesCode(folder)]),
    "the format before archives": lambda folder: saved([MakesFolder(folder)], _use_new_zipfile_serialization=False),
    "a tar archive": lambda folder: in_a_tar(pickle.dumps(MakesFolder(folder))),
    "a bare pickle": lambda folder: pickle.dumps(MakesFolder(folder)),
    "a bare pickle of protocol 0": lambda folder: pickle.dumps(MakesFolder(folder), protocol=0),
    "an archive in an archive": lambda folder: in_an_archive(saved(MakesFolder(folder))),
    "protocol 4 in an archive": lambda folder: in_an_archive(pickle.dumps(MakesFolder(folder), protocol=4)),
    "a computed name": lambda folder: in_an_archive(COMPUTED),
    "a Torch Script archive": lambda folder: script_module(),
    "nothing": lambda folder: b"",
    "text": lambda folder: b"weights",
}


def script_module() -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(torch.nn.ReLU(), torch.ones(1)), buffer)
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("disguise", DISGUISES.values(), ids=DISGUISES.keys())
def test_a_pickle_that_would_run_code_is_refused_without_running_it(disguise, tmp_path):
    path = tmp_path / "model_states.pt"
    path.write_bytes(disguise(tmp_path / "was_run"))
    (problem,) = pickle_problems(path)
    assert problem.startswith(f"{path} is refused: ") and "\n" not in problem and "weights_only=False" not in problem
    with pytest.raises((ValueError, RuntimeError, EOFError)), restricted_unpickling():
        TorchCheckpointEngine().load(str(path))
    assert not (tmp_path / "was_run").exists()


def test_deepspeed_states_of_every_precision_are_accepted_and_restored(tmp_path):
    path = tmp_path / "optim_states.pt"
    scaler = DynamicLossScaler(2.0**16, 1000, 1, 2, False, dtype=torch.float16)
    state = {
        "scaler": scaler, "static": LossScaler(4.0), "stage": ZeroStageEnum(2), "mapping": fragment_address(3, 5),
        "exp_avg": torch.arange(3.0), "shape": torch.Size([2, 3]), "dtype": torch.bfloat16, "betas": (0.9, 0.95),
    }  # fmt: skip
    torch.save(state, path)
    assert pickle_problems(path) == []
    with restricted_unpickling():
        loaded = TorchCheckpointEngine().load(str(path))
    assert vars(loaded["scaler"]) == vars(scaler) and loaded["static"].cur_scale == 4.0
    assert torch.equal(loaded["exp_avg"], state["exp_avg"])
    for name in ("stage", "mapping", "shape", "dtype", "betas"):
        assert loaded[name] == state[name]


def test_restricted_unpickling_restores_the_environment(monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    before, allowed = dict(os.environ), set(torch.serialization.get_safe_globals())
    with pytest.raises(ValueError, match="nothing"), restricted_unpickling():
        assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
        raise pickle.UnpicklingError("nothing")
    assert dict(os.environ) == before
    assert set(torch.serialization.get_safe_globals()) == allowed
