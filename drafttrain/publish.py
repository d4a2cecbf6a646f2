"""`drafttrain publish`: a folder that holds an export, its model card and its report, checked, and its upload with
huggingface_hub.
"""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token, metadata_load, metadata_save
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from rich.table import Table

from drafttrain.data.files import replace_folder
from drafttrain.data.run_folder import RunFolder
from drafttrain.drafts.base import read_facts, tuned_facts, tuned_target
from drafttrain.drafts.loading import draft_method
from drafttrain.errors import UserError
from drafttrain.evaluate.report import REPORT_FILES
from drafttrain.evaluate.report_tables import gibibytes
from drafttrain.export.card import FILE as CARD
from drafttrain.export.card import Source, newest_report
from drafttrain.export.check import FAIL, PASS, CheckReport, check_draft
from drafttrain.export.gguf import FILE as GGUF
from drafttrain.recipe_rules import ENGINES
from drafttrain.target_files import unreachable

NAMES = sorted({engine for engines in ENGINES.values() for engine in engines})
PLACES = (r'"model": "([^"]+)"', r"--speculative-draft-model-path (\S+)", r'assistant_model="([^"]+)"')
"""Where the serve commands of a card name the folder of the draft, for engines that read hub ids there."""
KEY = re.compile(r"--api-key[= ]+(?!HIDDEN)[^\s\"<]+")
TEXTS = (".json", ".md", ".html")


class PublishError(UserError):
    """A draft that cannot be published: what was found, what was expected, and the next command."""


@dataclass(frozen=True)
class Exported:
    """An export that is to be published: its folder, engine and target, and the run it came from, if that is known."""

    folder: Path
    engine: str
    target: str
    run: RunFolder | None
    tuned: Path | None = None

    @classmethod
    def find(cls, source: str | Path, engine: str | None = None, target: str | None = None) -> "Exported":
        """Of a run folder the export for `engine` (None: the recipe's), or an export's own folder. PublishError where
        there is none, where it is older than the run's draft or report, or where its target is not known.
        """
        if engine is not None and engine not in NAMES:
            raise PublishError(f"--engine is {engine!r}, expected one of {', '.join(NAMES)}")
        path = Path(source)
        run = RunFolder(path)
        if run.recipe_file.exists():
            engine = engine or run.recipe().export.engine
            folder = path / "export" / engine
        else:
            folder, run = path, _run_of(path)
            engine = engine or (path.name if path.name in NAMES else "vllm")
        again = f"drafttrain export {run.path if run else 'RUN'} --engine {engine}"
        if not (folder / "config.json").exists() or not (folder / CARD).exists():
            raise PublishError(
                f"{folder} is no export with a model card ({CARD}). Expected the folder that `drafttrain export` "
                f"writes. Mend: {again}"
            )
        if run is not None:
            _check_age(folder, run, again)
        facts = read_facts(folder / "drafttrain.json") if (folder / "drafttrain.json").exists() else {}
        tuned = tuned_target(run.draft) if run is not None else None
        name = target or (str(tuned) if tuned else None) or (run.recipe().target.name_or_path if run else None)
        name = name or facts.get("target")
        if name is None:
            raise PublishError(f"{folder} does not say which target it was made for. Mend: --target NAME_OR_PATH")
        return cls(folder, engine, name, run, tuned)

    @property
    def place(self) -> Path:
        """Where the folder to upload is written, unless another one is asked for."""
        if self.run is not None:
            return self.run.path / "publish" / self.engine
        return self.folder.with_name(f"{self.folder.resolve().name}-publish")

    @property
    def reports(self) -> list[Path]:
        """report.json and report.html of the newest evaluation of this very draft; empty where there is none."""
        found = None if self.run is None else _newest(self.run)
        return [path for name in REPORT_FILES if found and (path := found.with_name(name)).exists()]


def _run_of(folder: Path) -> RunFolder | None:
    """The run of an export that lies in <run>/export/."""
    above = folder.resolve().parents
    run = RunFolder(above[1]) if len(above) > 1 else None
    return run if run is not None and above[0].name == "export" and run.recipe_file.exists() else None


def _newest(run: RunFolder) -> Path | None:
    found = newest_report(Source.of(run.draft), draft_method(run.draft), run.draft)
    return found[0] if found else None


def _check_age(folder: Path, run: RunFolder, again: str) -> None:
    """PublishError where the run has gone on since it was exported."""
    if not (run.draft / "config.json").exists():
        return
    made, written = (run.draft / "config.json").stat().st_mtime, (folder / CARD).stat().st_mtime
    report = _newest(run)
    if made > written:
        raise PublishError(f"{folder} is older than {run.draft}. Expected the draft as it is now. Mend: {again}")
    if report is not None and report.stat().st_mtime > written:
        raise PublishError(
            f"the model card in {folder} is older than {report}. Expected a card with its figures. Mend: {again}"
        )


def check_repo(repo: str, option: str = "--to") -> None:
    """PublishError for a name that the hub would refuse, by huggingface_hub's own rules, or that has no owner."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise PublishError(f"{option} is {repo!r}: {error} Mend: {option} OWNER/NAME") from error
    if "/" not in repo:
        raise PublishError(f"{option} is {repo!r}. Expected the owner too. Mend: {option} OWNER/{repo}")


def check_served(exported: Exported) -> CheckReport:
    """What `drafttrain check` says of the export for its engine. PublishError, with each mend, unless it passes."""
    report = check_draft(exported.folder, exported.target, exported.engine)
    (verdict,) = report.engines
    if verdict.verdict != PASS:
        found = "; ".join(f"{one.found}: {exported.engine} {one.would} (mend: {one.mend})" for one in verdict.findings)
        word = "fails" if verdict.verdict == FAIL else "is not supported"
        raise PublishError(
            f"{exported.folder} {word} for {exported.engine}: {found}. Expected a draft that is served as it was "
            f"trained. Mend: drafttrain check {exported.folder} --target {exported.target} says more"
        )
    return report


def build_folder(exported: Exported, repo: str, place: Path, base_model: str | None = None) -> list[Path]:
    """Write the folder to upload (a former one is replaced) and return its files: the export, whose weights take no
    disk twice where links are possible, its card with `repo` in the serve commands, and the report. base_model: the
    target's hub id, for a card that names a file or a folder.
    """
    reports = exported.reports
    for path in reports:
        found = KEY.search(path.read_text(encoding="utf-8"))
        if found:
            raise PublishError(
                f"{path} holds the key of a server ({found.group().split()[0]} ..). Expected none in what is "
                "published. Mend: put it into OPENAI_API_KEY and evaluate again."
            )
    if place.is_file() or (place.exists() and any(place.iterdir()) and not (place / CARD).exists()):
        raise PublishError(f"{place} holds something else. Expected a new folder, or a former one. Mend: --output")

    def fill(new: Path) -> None:
        shutil.copytree(exported.folder, new, copy_function=_linked, dirs_exist_ok=True)
        text = (exported.folder / CARD).read_text(encoding="utf-8")
        (new / CARD).unlink()
        (new / CARD).write_text(with_repo(text, repo), encoding="utf-8")
        if base_model is not None:
            metadata_save(new / CARD, {**metadata_load(new / CARD), "base_model": base_model})
        for path in reports:
            shutil.copyfile(path, new / path.name)

    replace_folder(place, fill)
    return sorted(path for path in place.rglob("*") if path.is_file())


def _linked(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except OSError:  # Another disk, or one without links.
        shutil.copyfile(source, to)


def with_repo(card: str, repo: str) -> str:
    """A card whose serve commands load the draft from the hub and not from the folder it was exported to."""

    def named(found: re.Match) -> str:
        start, end = (place - found.start() for place in found.span(1))
        return found[0][:start] + repo + found[0][end:]

    for pattern in PLACES:
        card = re.sub(pattern, named, card)
    fetch = f"hf download {repo} {GGUF} --local-dir .\n"
    return re.sub(rf"^(llama-server .* -md )\S+/{GGUF}", rf"{fetch}\1{GGUF}", card, flags=re.MULTILINE)


def notes_of(exported: Exported, files: list[Path]) -> list[str]:
    """What to know before it is public."""
    notes = []
    card = next(path for path in files if path.name == CARD)
    base = str((metadata_load(card) or {}).get("base_model"))
    if "/" not in base:
        notes.append(f"base_model in {card} is {base}, no hub id: give --base-model OWNER/NAME")
    if not exported.reports:
        notes.append("there is no evaluation report of this draft: the card says so")
    if exported.tuned is not None:
        name = tuned_facts(exported.run.draft).get("tuned_from")
        notes.append(f"these heads are served with {exported.tuned}, tuned from {name}, alone: publish that too")
    home = str(Path.home())
    names = [path.name for path in files if path.suffix in TEXTS and home in path.read_text(encoding="utf-8")]
    if names:
        notes.append(f"folders of this machine below {home} are named in {', '.join(names)}")
    return notes


def files_table(files: list[Path], place: Path) -> Table:
    """Every file of the folder and its size."""
    table = Table("file", "size")
    table.columns[1].justify = "right"
    for path in files:
        table.add_row(str(path.relative_to(place)), size_of(path.stat().st_size))
    table.add_section()
    table.add_row(f"{len(files)} files", size_of(sum(path.stat().st_size for path in files)))
    return table


def size_of(count: int) -> str:
    return f"{count} B" if count < 2**20 / 10 else gibibytes(count)


def upload(place: Path, repo: str, private: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Make the repository where it is missing and upload the folder in one commit: {"url", "commit"}. PublishError
    without a network or a token, where the hub refuses, and where `private` is asked for and the repository is not.
    """
    ready = f"{place} is ready: publish again, or hf upload {repo} {place}"
    why = unreachable()
    if why is not None:
        raise PublishError(f"{why}. Expected the hub. Mend: look at the network and HF_HUB_OFFLINE. {ready}")
    if get_token() is None:
        raise PublishError(f"there is no token for the hub. Mend: hf auth login, or set HF_TOKEN. {ready}")
    api = HfApi()
    try:
        api.create_repo(repo, private=True if private else None, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise PublishError(f"{repo} exists and is public; --private was asked for. Mend: another --to. {ready}")
        say(f"uploading to {repo}")
        commit = api.upload_folder(
            repo_id=repo, folder_path=place, commit_message="Draft model, model card and evaluation report"
        )
    except HfHubHTTPError as error:
        raise _refused(repo, error, ready) from error
    except OSError as error:
        raise PublishError(f"the upload to {repo} broke off ({error}). Mend: {ready}") from error
    return {"url": f"{api.endpoint}/{repo}", "commit": commit.oid}


def _refused(repo: str, error: HfHubHTTPError, ready: str) -> PublishError:
    status = error.response.status_code
    mends = {
        401: "the token is not valid: hf auth login, or another HF_TOKEN",
        403: f"the token must be allowed to write to {repo.split('/')[0]}: make one with that right",
        404: f"check {repo} and that the token may see it",
    }
    told = " ".join((error.server_message or str(error)).split())[:200]
    return PublishError(f"{repo}: the hub refused ({status}: {told}). Mend: {mends.get(status, 'try again')}. {ready}")
