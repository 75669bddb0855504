"""A converted checkpoint on the hub: only if asked for, checked before the work, sent after it."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id


def check(repo: str, source: str | Path) -> None:
    """Raise ValueError if this name cannot be written to by whoever is logged in."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"--push-to-hub must be USER/NAME, got {repo!r}: {error}") from error
    owner, slash, _ = repo.partition("/")
    if not slash:
        raise ValueError(f"--push-to-hub must be USER/NAME, got {repo!r}")
    if repo == str(source):
        raise ValueError(f"--push-to-hub must not be the model that is converted, got {repo!r}")
    try:
        account = HfApi().whoami()
    except Exception as error:  # no token, a bad one, no network
        raise ValueError(
            f"--push-to-hub {repo}: the hub does not know who you are (hf auth login): "
            f"{_first_line(error)}"
        ) from error
    owners = [account["name"], *(each["name"] for each in account.get("orgs", []))]
    if owner not in owners:
        raise ValueError(
            f"--push-to-hub must be of {' or '.join(owners)}, who is logged in, got {repo!r}"
        )


def push(folder: Path, repo: str, *, private: bool) -> str:
    """Upload a finished folder; the address of what was made.

    Raises:
        OSError: it failed; the folder is as it was, and the error says how to upload it.
    """
    try:
        api = HfApi()
        # private=None: the hub's default for new ones; what exists keeps what it is.
        api.create_repo(repo, private=private or None, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Converted by hf-sigmoid"
        )
    except Exception as error:  # network, rights, quota
        option = " --private" if private else ""
        raise OSError(
            f"the upload failed, {folder} is complete: {_first_line(error)}. Upload it by: "
            f"hf upload {repo} {folder}{option}"
        ) from error
    return str(commit.repo_url)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
