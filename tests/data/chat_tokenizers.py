"""A byte-level test tokenizer without merges (a token a byte), chat templates of several families, ids by hand."""

from itertools import groupby

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from drafttrain.data.conversations import Conversation

TURN_ENDS = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>"]
HEADERS = ["<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>"]
SPECIALS = ["<bos>", "</s>", *TURN_ENDS, *HEADERS]
STOPS = ["</s>", *TURN_ENDS]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
CORPUS = ["the user asked the assistant about a model", "hello hello world, a user said hi. Fine!\n"] * 20

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (first if loop.first else '') }}"
    "{{ m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
QWEN3 = """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content %}
    {%- if m.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- content }}{%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def make_tokenizer(
    template=None, *, adds_bos=True, merges=0, trim_offsets=True, specials=SPECIALS, bos="<bos>", eos="</s>"
):
    """Byte-level BPE without merges: a token a byte, behind the special tokens, which come first, from 0."""
    base = Tokenizer(models.BPE(unk_token=None))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=list(specials),
        initial_alphabet=BYTES,
        vocab_size=len(specials) + len(BYTES) + merges,
        show_progress=False,
    )
    base.train_from_iterator(CORPUS if merges else [], trainer)
    base.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    trim = processors.ByteLevel(trim_offsets=trim_offsets)
    if adds_bos:
        first = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, specials.index(bos))])
        base.post_processor = processors.Sequence([trim, first])
    else:
        base.post_processor = trim
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def by_hand(tokenizer, *runs):
    """Ids and mask of alternating unsupervised and supervised text, one special, think tag or byte at a time."""
    ids, mask = [], []
    whole_words = [added.content for added in tokenizer.added_tokens_decoder.values()]
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for i, text in enumerate(runs):
        while text:
            whole = next((word for word in whole_words if text.startswith(word)), text[0])
            pieces = [whole] if len(whole) > 1 else list(alphabet.pre_tokenize_str(whole)[0][0])
            ids += [tokenizer.get_vocab()[piece] for piece in pieces]
            mask += [i % 2] * len(pieces)
            text = text[len(whole) :]
    return ids, mask


def stops(tokenizer):
    return tuple(tokenizer.convert_tokens_to_ids(stop) for stop in STOPS)


def talk(*contents, system=None):
    roles = ["user", "assistant"] * len(contents)
    turns = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    head = [] if system is None else [{"role": "system", "content": system}]
    return Conversation(messages=(*head, *turns), source="f.jsonl:1")


def mask_runs(encoded, tokenizer):
    """The sequence as runs of (text, supervised), special tokens spelled out."""
    runs = groupby(zip(encoded.input_ids, encoded.loss_mask, strict=True), key=lambda pair: bool(pair[1]))
    return [
        (tokenizer.decode([t for t, _ in run], clean_up_tokenization_spaces=False), supervised)
        for supervised, run in runs
    ]
