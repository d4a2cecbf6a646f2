"""One generated text for the terminal, each token coloured by where it came from: a draft's position, or the target."""

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from drafttrain.specdec.decode import Generation

# Position 1, 2, .. of a round: from a cold to a warm colour. Readable on dark and light terminals.
SHADES = ("#2563eb", "#0891b2", "#059669", "#65a30d", "#ca8a04", "#ea580c", "#dc2626", "#be185d")


def shade(position: int) -> Style:
    """The style of an accepted draft at a position counted from 1."""
    return Style(color=SHADES[min(position, len(SHADES)) - 1], bold=True)


def positions(generation: Generation) -> list[int]:
    """For each token its position among its round's accepted drafts, from 1; 0 for the target's own tokens."""
    out: list[int] = []
    for delivered, drafted in zip(generation.deliveries, generation.drafted, strict=True):
        out += [*range(1, drafted + 1), *[0] * (delivered - drafted)]
    return out


def pieces(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text that each token adds. Where several tokens make one character, the last of them shows it."""
    out, done = [], ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], skip_special_tokens=False)
        if text.endswith("�") and end < len(tokens):
            out.append("")
            continue
        out.append(text[len(done) :] if text.startswith(done) else text[-1:])
        done = text
    return out


def coloured(generation: Generation, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The generation's text: the target's own tokens plain, accepted drafts in the colour of their position."""
    text = Text()
    for piece, position in zip(pieces(generation.tokens, tokenizer), positions(generation), strict=True):
        text.append(piece, shade(position) if position else None)
    return text


def legend(deepest: int) -> Text:
    """What the colours mean, for positions up to `deepest`."""
    text = Text("target ")
    for position in range(1, min(deepest, len(SHADES)) + 1):
        more = "+" if position == len(SHADES) and deepest > position else ""
        text.append(f" draft {position}{more} ", shade(position))
    return text
