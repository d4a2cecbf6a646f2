"""Finding and reading a target on disk, on the hub or in a GGUF file, and the sha256 fingerprint that keys caches.

A GGUF file is turned into safetensors once, in the cache. Whatever is wrong with the files ends in a TargetError."""

import fcntl
import hashlib
import http.client
import importlib.util
import json
import os
import shutil
import ssl
import struct
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import torch
from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, StrictDataclassError
from rich.console import Console
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from drafttrain.errors import UserError
from drafttrain.target_bare import loader_of

MEGABYTE = 1 << 20
GGUF_CONVERSION = b"drafttrain gguf conversion 1"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
STORED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
HUB_SMALL_FILES = ["*.json", "*.py", "*.model", "*.jinja", "*.txt"]
HUB_FILES = [*HUB_SMALL_FILES, "*.safetensors"]
HUB_EXTRAS = ["original/*", "consolidated*", "onnx/*"]
LOADING_ERRORS = (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError, StrictDataclassError)
GGUF_ERRORS = (*LOADING_ERRORS, struct.error, IndexError)


class TargetError(UserError):
    """A target that cannot be found, read or used: what was found, what was expected, and the mend."""


def cache_folder() -> Path:
    """$DRAFTTRAIN_CACHE, or ~/.cache/drafttrain. Not created here."""
    return Path(os.environ.get("DRAFTTRAIN_CACHE") or Path.home() / ".cache" / "drafttrain")


def find_folder(
    name_or_path: str, gguf_file: str | None, revision: str | None, trust_remote_code: bool, weights: bool = True
) -> Path:
    """The local folder that holds the target, checked; a GGUF file is converted and a hub id downloaded first.

    weights False: config and tokenizer suffice, and only these are downloaded."""
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf":
        return convert_gguf(path)
    if gguf_file is not None:
        if not path.is_dir():
            raise TargetError(
                f"target.gguf_file is {gguf_file!r} but {name_or_path!r} is not a folder. Expected the folder that "
                "holds the file. Mend: download the file and give its path as target.name_or_path."
            )
        return convert_gguf(path / gguf_file)
    if path.is_file():
        raise TargetError(
            f"{path} is a file. Expected a folder with config.json and safetensors files, a hub id, or a .gguf file. "
            f"Mend: name the folder, e.g. {path.parent}."
        )
    if not path.is_dir():
        if path.is_absolute() or name_or_path.startswith((".", "~")) or name_or_path.count("/") > 1:
            raise TargetError(
                f"No target at {name_or_path!r}: there is no such folder. Expected a folder with config.json and "
                "safetensors files, a hub id such as google/gemma-3-270m, or a .gguf file. Mend: check the spelling."
            )
        path = fetch(name_or_path, revision, trust_remote_code, weights)
    if weights:
        check_folder(path)
    return path


def check_folder(folder: Path) -> None:
    """Raises TargetError unless the folder has a readable config.json and every safetensors shard its index names."""
    if not (folder / "config.json").is_file():
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        mend = "name the folder that save_pretrained wrote"
        if ggufs:
            mend = f"give target.gguf_file: {ggufs[0]}"
        elif (folder / "adapter_config.json").is_file():
            mend = "it is a PEFT adapter: merge it into its base model (merge_and_unload) and save that"
        raise TargetError(f"{folder} has no config.json. Expected a transformers model folder. Mend: {mend}.")
    files = weight_files(folder)
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise TargetError(
            f"{folder} lacks {len(missing)} of the {len(files)} weight files its index names, the first {missing[0]}. "
            "Mend: finish the download."
        )
    if not files:
        old = sorted(
            path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.safetensors") for path in folder.glob(pattern)
        )
        found = f"only {', '.join(old[:3])}" if old else "no weight files"
        raise TargetError(
            f"{folder} has {found}. Expected model.safetensors, or model.safetensors.index.json and its shards. Mend: "
            "load the model with transformers and write it again with save_pretrained."
        )
    for path in files:
        read_header(path)


def read_json(path: Path, mend: str = "download or write it again") -> dict:
    """A JSON object from a file; TargetError when it is broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TargetError(f"{path} cannot be read as JSON ({error}). Mend: {mend}.") from error
    if not isinstance(content, dict):
        raise TargetError(f"{path} holds a JSON {type(content).__name__}. Expected an object. Mend: {mend}.")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers reads, in a fixed order: the single file, or those the index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict):
        raise TargetError(f"{index} has no weight_map. Mend: download it again.")
    return sorted(folder / name for name in set(named.values()))


def read_header(path: Path) -> tuple[bytes, int]:
    """A safetensors file's JSON header and the offset at which its data starts; TargetError when it is cut short."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= size else b""
    if size < 8 or len(header) != length or length == 0:
        raise TargetError(f"{path} is not a complete safetensors file ({size} bytes). Mend: download it again.")
    return header, 8 + length


def fetch(name: str, revision: str | None, trust_remote_code: bool, weights: bool = True) -> Path:
    """The snapshot folder of a hub id: downloaded where needed, its config first, and checked. TargetError as
    `download` and `read_config`; without a network in seconds, where the hub's own client would retry for half a
    minute."""
    folder = download(name, revision, HUB_SMALL_FILES)
    read_config(str(folder), trust_remote_code)
    return download(name, revision, HUB_FILES) if weights else folder


def download(name: str, revision: str | None, patterns: list[str]) -> Path:
    """The snapshot folder of a hub id with the files of these patterns; the cached one when the hub is out of reach.

    TargetError in seconds without a network, and where the hub refuses.
    """
    why = unreachable()
    if why is not None:
        try:
            config = try_to_load_from_cache(name, "config.json", revision=revision)
        except ValueError:  # No name that a model could have.
            config = None
        if isinstance(config, str):
            return Path(config).parent
        raise TargetError(
            f"{name!r} is neither a local folder nor in the hub's cache, and {why}. Expected a folder, a cached "
            "model or a hub id. Mend: check the spelling and the network, or pass a local folder."
        )
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=HUB_EXTRAS))
    except LOADING_ERRORS as error:
        raise loading_error(name, "the model", error) from error


def unreachable() -> str | None:
    """Why the hub cannot be asked, found out in 5 seconds at most; None: it answers, be it with a refusal."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        urllib.request.urlopen(request, timeout=5).close()
    except urllib.error.HTTPError:
        return None
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.URLError) and isinstance(error.reason, ssl.SSLError):
            return None
        return f"{constants.ENDPOINT} cannot be reached ({error})"
    return None


def read_config(source: str, trust_remote_code: bool) -> PretrainedConfig:
    """The model's config; TargetError for anything that is not a decoder-only text generator."""
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except LOADING_ERRORS as error:
        raise loading_error(source, "config.json", error) from error
    names = config.architectures or []
    generators = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForImageTextToText")
    known = config.model_type in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    if not known and not trust_remote_code:
        kind = f"model type {config.model_type!r}, which has no causal language model"
    elif names and not any(name.endswith(generators) for name in names):
        kind = f"{names[0]}, which does not generate text (an encoder, a bare backbone or a classifier)"
    elif config.is_encoder_decoder:
        kind = f"{names[0] if names else config.model_type}, an encoder-decoder"
    else:
        return config
    raise TargetError(f"{source} holds {kind}. Expected a decoder-only language model. Mend: choose another target.")


def loading_error(source: str, what: str, error: BaseException) -> TargetError:
    """One TargetError for what transformers says about a model that does not load."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        mend = "set target.trust_remote_code: true if you trust the model's own code"
    elif isinstance(error, GatedRepoError):
        mend = "accept the licence on the model's page and set HF_TOKEN"
    elif isinstance(error, RepositoryNotFoundError):
        mend = "check the spelling, set HF_TOKEN for a private model, or pass a local folder"
    elif "does not recognize this architecture" in text:
        mend = "upgrade transformers, or choose a target it knows"
    else:
        mend = "check that all files are complete and that this transformers release knows the model"
    return TargetError(f"{source}: {what} cannot be loaded ({type(error).__name__}: {text[:300]}). Mend: {mend}.")


def choose_device(device: str) -> torch.device:
    """auto: CUDA where there is one, otherwise the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise TargetError(f"target.device is {device!r}. Expected auto, cpu, cuda or cuda:0.") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise TargetError(f"target.device is {device!r} but PyTorch sees {torch.cuda.device_count()} CUDA devices.")
    return chosen


def choose_dtype(dtype: str, config: PretrainedConfig, folder: Path, device: torch.device) -> torch.dtype:
    """The dtype to load in. auto: the config's (float32 only if so stored); float16 on a CPU becomes bfloat16."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise TargetError(f"target.dtype is {dtype!r}. Expected auto, {', '.join(DTYPES)}.")
        return DTYPES[dtype]
    chosen = config.get_text_config().dtype or config.dtype
    if chosen in (None, torch.float32):
        stored = stored_dtypes(folder)
        chosen = max(set(stored), key=stored.count) if stored else torch.bfloat16
    return torch.bfloat16 if chosen == torch.float16 and device.type == "cpu" else chosen


def stored_dtypes(folder: Path) -> list[torch.dtype]:
    """The floating dtype of each tensor stored in a folder's safetensors files."""
    headers = [json.loads(read_header(path)[0]) for path in weight_files(folder)]
    entries = [entry for header in headers for name, entry in header.items() if name != "__metadata__"]
    return [STORED_DTYPES[entry["dtype"]] for entry in entries if entry["dtype"] in STORED_DTYPES]


def read_model(source: str, config: PretrainedConfig, options: dict) -> PreTrainedModel:
    """The model in eval mode, with every weight read from the files."""
    loader = loader_of(config, options["trust_remote_code"])
    try:
        model, info = loader.from_pretrained(source, use_safetensors=True, output_loading_info=True, **options)
    except LOADING_ERRORS as error:
        raise loading_error(source, "the weights", error) from error
    check_complete(source, info)
    return model.eval()


def check_complete(source: str, loading_info: dict) -> None:
    """TargetError when weights were missing: transformers draws them at random and only warns."""
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise TargetError(
            f"{source} lacks {len(missing)} of the model's weights, the first {missing[0]}. Expected all of them; "
            "they would be random. Mend: finish the download, or check that config.json belongs to these weights."
        )


def read_tokenizer(source: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model, chat template included."""
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except LOADING_ERRORS as error:
        raise loading_error(source, "the tokenizer", error) from error


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """A target's tokenizer alone, without its weights: of a folder, a hub id or a .gguf file."""
    return read_tokenizer(str(find_folder(name_or_path, None, None, False, weights=False)), False)


def convert_gguf(path: Path) -> Path:
    """The folder in the cache that holds a GGUF file as bf16 safetensors, written on first use.

    The folder is complete or absent: it is written beside its name and renamed. Others wait for the first to do so."""
    if not path.is_file():
        raise TargetError(f"No GGUF file at {path}. Mend: check target.name_or_path and target.gguf_file.")
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(MEGABYTE)
        file.seek(max(0, size - MEGABYTE))
        last = file.read(MEGABYTE)
    if first[:4] != b"GGUF":
        raise TargetError(f"{path} does not start with the GGUF magic. Expected a GGUF file. Mend: download it again.")
    if importlib.util.find_spec("gguf") is None:
        raise TargetError(f"Reading {path.name} needs the gguf package. Mend: pip install drafttrain[gguf].")
    key = hashlib.sha256(b"".join([GGUF_CONVERSION, str(size).encode(), first, last])).hexdigest()
    folder = cache_folder() / "gguf" / key[:32]
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(cache_folder() / f"gguf-{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _convert_into(folder, path, size)
    return folder


def _convert_into(folder: Path, path: Path, size: int) -> None:
    beside = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
    try:
        with Console(stderr=True).status(f"Converting {path.name} to safetensors (once, {size / 1e6:.0f} MB)"):
            write_dequantized(path, beside)
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_dequantized(path: Path, folder: Path) -> None:
    """Model and tokenizer of a GGUF file as a plain bf16 folder, without any trace of the quantisation."""
    source, name = str(path.parent), path.name
    dense = GgufConfig(dequantize=True)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=name, dtype=torch.bfloat16, quantization_config=dense, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    except GGUF_ERRORS as error:
        raise loading_error(str(path), "the GGUF file", error) from error
    check_complete(str(path), info)
    vars(model.config).pop("quantization_config", None)
    vars(model).pop("hf_quantizer", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fingerprint_folder(folder: Path) -> str:
    """sha256 over config, tokenizer, template, and of each shard its header and 1 MB spread over all its tensors.

    The sample takes the start of every tensor, so that a fine-tune of late layers only is another target."""
    digest = hashlib.sha256()
    for name in ("config.json", *TOKENIZER_FILES):
        if (folder / name).is_file():
            add_part(digest, name, (folder / name).read_bytes())
    for path in weight_files(folder):
        header, start = read_header(path)
        add_part(digest, path.name, header)
        entries = [entry for name, entry in sorted(json.loads(header).items()) if name != "__metadata__"]
        share = max(64, MEGABYTE // max(1, len(entries)))
        with path.open("rb") as file:
            for entry in entries:
                begin, end = entry["data_offsets"]
                file.seek(start + begin)
                digest.update(file.read(min(share, end - begin)))
    return digest.hexdigest()


def add_part(digest, name: str, content: bytes) -> None:
    """Feed one named part with its length, so that parts cannot run into each other."""
    digest.update(f"{name}:{len(content)}:".encode())
    digest.update(content)
