"""The settings that determine the preference pairs of a run: they must be unchanged when it is resumed."""

import hashlib
from pathlib import Path
from typing import Any

from datasets import Dataset

from dschat.arguments import PairSettings
from dschat.arguments.secrets import redacted_values
from dschat.data.arrow import content_digest
from dschat.distributed import collectives

EDGE = 1 << 16  # bytes at each end of a weight file that enter the digest
FLAGS = (
    "model_name_or_path", "num_samples_per_prompt", "pairs_per_prompt", "max_prompt_seq_len", "max_answer_seq_len",
    "temperature", "top_k", "top_p", "judge",
)  # fmt: skip


def settings_of_pairs(settings: PairSettings, prompts: Dataset) -> dict[str, Any]:
    """Flags and digests of model and prompts that determine the pairs; the batch size is not among them."""
    sampling = settings.sampling
    flags = {f"--{name}": vars(sampling)[name] for name in FLAGS} | {
        "--reward": redacted_values(settings.rewards.reward),
        "--dtype": settings.devices.dtype, "--seed": settings.run.seed,
    }  # fmt: skip
    content = content_digest(prompts) if collectives.is_main() else None  # settings are compared on the main rank
    return flags | {
        "the model's weights": weights_digest(Path(sampling.model_name_or_path)), "prompts": len(prompts),
        "the prompts' content": content,
    }  # fmt: skip


def weights_digest(folder: Path) -> str:
    """Digest of both ends of a local model's weight files, enough to detect training; "" for a hub name."""
    digest = hashlib.sha256()
    files = sorted(path for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".json"))
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(EDGE))
            file.seek(max(size - EDGE, 0))
            digest.update(file.read())
    return digest.hexdigest()[:16] if files else ""
