"""Which token came from where, and that the coloured text is the text."""

from drafttrain.evaluate.colours import SHADES, coloured, legend, pieces, positions
from drafttrain.specdec.decode import Generation
from tests.tiny_models import make_tokenizer


def test_positions_by_hand():
    done = Generation([5, 6, 7, 8, 9, 10], deliveries=[1, 3, 2], drafted=[0, 2, 2])
    assert positions(done) == [0, 1, 2, 0, 1, 2]


def test_the_coloured_text_is_the_text():
    tokenizer = make_tokenizer()
    tokens = tokenizer("w1 w2 w3 w4")["input_ids"]
    done = Generation(tokens, deliveries=[1, 2, 1], drafted=[0, 1, 0])
    text = coloured(done, tokenizer)
    assert text.plain == tokenizer.decode(tokens) == "".join(pieces(tokens, tokenizer))
    styled = [text.plain[span.start : span.end] for span in text.spans]
    assert styled == ["w2"]


def test_the_legend_goes_as_deep_as_the_drafts():
    assert legend(0).plain == "target "
    assert legend(2).plain == "target  draft 1  draft 2 "
    assert legend(20).plain.endswith(f"draft {len(SHADES)}+ ")


class Bytes:
    """Two tokens make one character."""

    def decode(self, tokens, skip_special_tokens=False):
        return bytes(tokens).decode("utf-8", errors="replace")


def test_a_character_of_two_tokens_is_shown_once():
    assert pieces(list("né!".encode()), Bytes()) == ["n", "", "é", "!"]
