"""What `drafttrain init` knows about a target: its config, from a hub id, a folder, a GGUF file or a config.json, and
the sizes that follow from it. No weights are read or downloaded.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from drafttrain.errors import UserError
from drafttrain.plan_target import STORED, ModelOutline, TargetOutline, outline_of
from drafttrain.target import find_decoder
from drafttrain.target_bare import bare_model, experts_of
from drafttrain.target_files import GGUF_ERRORS, LOADING_ERRORS, TargetError, find_folder, loading_error, read_config
from drafttrain.target_support import unsupported


class InitError(UserError):
    """A target, or a target and method, that no recipe can be written for: what was found, and the mend."""


@dataclass(frozen=True)
class Facts:
    """A target in numbers. config, outline: of the text model; family: model_type of the whole; wrapper: the class of
    the multimodal model around it, or None. inner: the MLP's width; experts, routed: of each layer and how many a token
    uses (0: dense). parameters: all, vision included; active: those a token is multiplied with; template: its chat
    template, None where it is not at hand.
    """

    name: str
    config: PretrainedConfig
    outline: ModelOutline
    family: str
    wrapper: str | None
    layers: int
    width: int
    vocab: int
    positions: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int | None
    experts: int
    routed: int
    parameters: int
    active: int
    quantised: str | None
    template: str | None

    @property
    def title(self) -> str:
        """The name for people: a hub id as it is, of a local path the last part."""
        return Path(self.name).name if Path(self.name).is_absolute() else self.name

    @property
    def kind(self) -> str:
        """model_type of the text model."""
        return self.config.model_type

    @property
    def latent(self) -> bool:
        """Whether its attention is latent (MLA, DeepSeek)."""
        return bool(self.config.to_dict().get("kv_lora_rank"))

    @property
    def weight_bytes(self) -> float:
        """As stored, or in bf16."""
        return self.parameters * (STORED.get(self.quantised, 2.0) if self.quantised else 2.0)

    def spread(self, gpus: int) -> TargetOutline:
        """As `drafttrain plan` counts it: in bf16, its weights in equal parts over so many GPUs."""
        size = round(self.weight_bytes)
        words = (2, "bfloat16", self.quantised)
        return TargetOutline(self.name, self.outline, self.parameters, size, *words, devices=gpus)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one token, bf16, windows not counted off."""
        return self.spread(1).kv_bytes


def read_facts(source: str, name: str | None = None) -> Facts:
    """The facts of a hub id, a folder, a .gguf file or a config.json; name: what the recipe calls the target.

    TargetError for what cannot be read, InitError for an architecture that cannot be a target.
    """
    config, folder = _open(source)
    path = Path(source).expanduser()
    if name is None and path.exists():  # Absolute: the recipe may lie anywhere.
        path = path.resolve()
        name = str(path.parent if path.is_file() and path.suffix != ".gguf" else path)
    name = name or source
    why = unsupported(config)
    if why is not None:
        raise InitError(f"{name}: model type {config.get_text_config(decoder=True).model_type!r} {why}")
    return _facts(name, config, None if folder is None else _template(folder))


def _open(source: str) -> tuple[PretrainedConfig, Path | None]:
    """(config of the whole model, folder of its small files or None)."""
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise TargetError(f"No GGUF file at {path}. Mend: check the path.")
        try:
            return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name), None
        except GGUF_ERRORS as error:
            raise loading_error(source, "the GGUF file's config", error) from error
    if path.is_file():
        return read_config(str(path), False), path.parent
    folder = find_folder(source, None, None, False, weights=False)
    return read_config(str(folder), False), folder


def _template(folder: Path) -> str | None:
    own, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    if not settings.is_file():
        return None
    try:
        found = json.loads(settings.read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError) as error:
        raise TargetError(f"{settings} cannot be read ({error}). Mend: download it again.") from error
    return found if isinstance(found, str) else None


def _facts(name: str, config: PretrainedConfig, template: str | None) -> Facts:
    text = config.get_text_config(decoder=True)
    values = text.to_dict()
    model, parameters, unread, wrapper = _count(name, config)
    missing = [key for key in ("num_hidden_layers", "hidden_size", "vocab_size") if not values.get(key)]
    missing += [] if values.get("max_position_embeddings") else ["max_position_embeddings"]
    if missing:
        raise InitError(f"{name}: config.json of type {text.model_type!r} does not give {', '.join(missing)}")
    heads = values["num_attention_heads"]
    experts, routed = experts_of(values) if unread else (0, 0)
    stored = config.to_dict().get("quantization_config") or {}
    return Facts(
        name=name,
        config=text,
        outline=outline_of(model, text),
        family=config.model_type,
        wrapper=wrapper,
        layers=values["num_hidden_layers"],
        width=values["hidden_size"],
        vocab=values["vocab_size"],
        positions=values["max_position_embeddings"],
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        inner=values.get("intermediate_size"),
        experts=experts,
        routed=routed,
        parameters=parameters,
        active=parameters - round(unread * (1 - routed / experts)) if experts else parameters,
        quantised=stored.get("quant_method"),
        template=template,
    )


def _count(name: str, config: PretrainedConfig) -> tuple[PreTrainedModel, int, int, str | None]:
    """(model without memory, its parameters, those of experts, class of a multimodal wrapper or None); InitError where
    its decoder is laid out otherwise than Target reads it.
    """
    try:
        model = bare_model(config)
    except (*LOADING_ERRORS, TypeError) as error:
        words = " ".join(str(error).split())[:200]
        raise InitError(
            f"{name}: no model of type {config.model_type!r} can be built from config.json ({words})"
        ) from error
    try:
        find_decoder(model)
    except TargetError as error:
        raise InitError(f"{name}: {str(error).partition(' Mend')[0]}") from error
    sizes = {key: parameter.numel() for key, parameter in model.named_parameters()}
    experts = sum(count for key, count in sizes.items() if ".experts." in key)
    whole = model.config.get_text_config(decoder=True) is model.config
    return model, sum(sizes.values()), experts, None if whole else type(model).__name__
