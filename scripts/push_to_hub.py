"""Upload an exported model or its adapters to the Hugging Face hub: the files of the model and its card, nothing else.

    python scripts/push_to_hub.py FOLDER REPO [--private] [--revision BRANCH] [--dry_run]

FOLDER is one that a run exported; a run's critic, adapters and moving average are folders of their own. REPO is NAME or
OWNER/NAME, and is created if missing. The token is read from HF_TOKEN, or is that of `hf auth login`. With --dry_run
only the files are listed, and nothing is sent. Read FOLDER/README.md first: it becomes public.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from dschat.arguments.script_inputs import existing_folder, exit_on_mistake
from dschat.arguments.secrets import redacted
from dschat.arguments.strict_json import read_json_object
from dschat.runs.card_examples import FOLDER_LINE
from dschat.runs.card_sources import hub_name

CARD, CONFIG, ADAPTER, INDEX = "README.md", "config.json", "adapter_config.json", "model.safetensors.index.json"
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", INDEX, "adapter_model.safetensors")
FILES = (
    CARD, "LICENSE*", CONFIG, "generation_config.json", ADAPTER, *WEIGHTS, "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken",
    "chat_template.jinja", "additional_chat_templates/*.jinja",
)  # fmt: skip


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=existing_folder, help="exported model, or adapters")
    parser.add_argument("repo", help="name on the hub: NAME or OWNER/NAME")
    parser.add_argument("--private", action="store_true", help="create a private repository; default: a public one")
    parser.add_argument("--revision", help="branch to upload to, created if missing; default: main")
    parser.add_argument("--dry_run", action="store_true", help="list the files and send nothing")
    return parser.parse_args(arguments)


def model_files(folder: Path) -> list[Path]:
    """The files of a model, with paths relative to its folder; Python files only if the config names custom code."""
    config = folder / CONFIG
    has_code = config.is_file() and "auto_map" in read_json_object(config, constants=True)
    patterns = [*FILES, "*.py"] if has_code else FILES
    paths = (path.relative_to(folder) for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    return sorted(set(paths))


def folder_problems(folder: Path) -> list[str]:
    """Why the folder cannot be uploaded: a line for each problem."""
    if not any((folder / name).is_file() for name in (CONFIG, ADAPTER)):
        adapter = folder / "adapter"
        there = f"; its adapters are in {adapter}" if (adapter / ADAPTER).is_file() else ""
        return [f"{folder}: is no exported model: it has neither {CONFIG} nor {ADAPTER}{there}"]
    is_adapter = (folder / ADAPTER).is_file()
    problems = _adapter_problems(folder) if is_adapter else _weight_problems(folder)
    if not (folder / "tokenizer_config.json").is_file():
        problems.append(f"{folder}: has no tokenizer: save it there with its save_pretrained")
    return problems + _card_problems(folder / CARD)


def _weight_problems(folder: Path) -> list[str]:
    if (folder / "model.safetensors").is_file():
        return []
    if not (folder / INDEX).is_file():
        return [f"{folder}: has no model.safetensors and no {INDEX}: name the folder of an exported model"]
    shards = set(read_json_object(folder / INDEX).get("weight_map", {}).values())
    missing = sorted(name for name in shards if not (folder / name).is_file())
    return [f"{folder}: {', '.join(missing)} of {INDEX} are missing: export the model again"] if missing else []


def _adapter_problems(folder: Path) -> list[str]:
    problems = []
    if not (folder / "adapter_model.safetensors").is_file():
        problems.append(f"{folder}: has no adapter_model.safetensors: export the adapters again")
    base = read_json_object(folder / ADAPTER, constants=True).get("base_model_name_or_path")
    if not base or hub_name(base) is None:
        problems.append(
            f"{folder}/{ADAPTER}: base_model_name_or_path {base} is a local folder, which nobody else can load: upload "
            "that model, and write its name on the hub there"
        )
    return problems


def _card_problems(card: Path) -> list[str]:
    if not card.is_file():
        return [f"{card.parent}: has no {CARD}: write a model card (exports of this suite have one)"]
    text = card.read_text(encoding="utf-8", errors="replace")
    if redacted(text) != text:
        return [f"{card}: a URL in it has a password or key: remove it"]
    return []


def repo_problems(repo: str) -> list[str]:
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        return [f"REPO {repo}: is no name of a repository: {error}"]
    return []


def access_problems() -> list[str]:
    """Why the hub cannot be reached at all."""
    problems = []
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        problems.append("HF_HUB_OFFLINE is set, which forbids uploads: unset it")
    if get_token() is None:
        problems.append("there is no token: set HF_TOKEN to one with write access, or run `hf auth login`")
    return problems


def operations_of(folder: Path, files: Sequence[Path], repo: str) -> list[CommitOperationAdd]:
    """Additions of these files; the card's code names the repository instead of the folder."""
    operations = []
    for path in files:
        content: bytes | str = str(folder / path)
        if path.as_posix() == CARD:
            card = (folder / path).read_text(encoding="utf-8")
            content = card.replace(FOLDER_LINE, f'folder = "{repo}"').encode()
        operations.append(CommitOperationAdd(path.as_posix(), content))
    return operations


def upload(options: argparse.Namespace, files: Sequence[Path]) -> str:
    """Create repository and branch, and commit the files; returns the commit's address.

    Weights of an earlier upload that these files do not replace are deleted in the same commit.

    Raises:
        HfHubHTTPError: the hub refused a request.
    """
    api = HfApi()
    # Whether a repository that exists is private is not changed.
    repo = api.create_repo(options.repo, private=options.private or None, exist_ok=True).repo_id
    if options.revision:
        api.create_branch(repo, branch=options.revision, exist_ok=True)
    names = {path.as_posix() for path in files}
    stale = [
        name for name in api.list_repo_files(repo, revision=options.revision)
        if name not in names and any(fnmatch(name, pattern) for pattern in WEIGHTS)
    ]  # fmt: skip
    operations = [*operations_of(options.folder, files, repo), *map(CommitOperationDelete, stale)]
    message = f"Upload of {options.folder.resolve().name} by dschat"
    return api.create_commit(repo, operations, commit_message=message, revision=options.revision).commit_url


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    with exit_on_mistake("push_to_hub"):
        problems = folder_problems(options.folder) + repo_problems(options.repo)
        problems += [] if options.dry_run else access_problems()
        if problems:
            raise ValueError("\n".join(problems))
        files = model_files(options.folder)
        for path in files:
            print(f"{(options.folder / path).stat().st_size:>14,} bytes  {path}")
        target = f"{options.repo}{f' ({options.revision})' if options.revision else ''}"
        if options.dry_run:
            print(f"dry run: {len(files)} files would be uploaded to {target}")
            return 0
        try:
            print(f"uploaded to {target}: {upload(options, files)}")
        except Exception as error:  # also of the HTTP library, which depends on the version of huggingface_hub
            reason = re.sub(r"\s+", " ", str(error)) or type(error).__name__
            raise ValueError(f"{target}: the upload failed: {redacted(reason)}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
