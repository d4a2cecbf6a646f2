"""Chat templates of model families, rebuilt in few words: the same special tokens, order and turns of phrase as theirs,
each with a tokenizer of one token per byte and the family's own special tokens.
"""

from dataclasses import dataclass

from tests.data.chat_tokenizers import make_tokenizer

TOOLS = ({"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},)
TOOLS_TEXT = '{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}'

# Qwen3: think block of the last turn only, an empty one where thinking is switched off or none was given.
QWEN3 = """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools or first %}
    {{- '<|im_start|>system\\n' + first }}
    {%- if tools %}{{- '\\n# Tools' }}{%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content if m.content is string else '' %}
        {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {{- ('\\n' if content or not loop.first else '') + '<tool_call>\\n{"name": "' + call.function.name }}
            {{- '", "arguments": ' ~ (call.function.arguments | tojson) ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# Llama 3.1: one call a turn, written as bare JSON; results come from ipython, as JSON.
LLAMA31 = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + ('Environment: ipython\\n' if tools else '') }}
{{- (messages[0].content | trim if messages[0].role == 'system' else '') + '<|eot_id|>' }}
{%- for m in rest %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- m.content | tojson }}{{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Gemma 2: no system role.
GEMMA2 = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for m in messages %}
    {%- set role = 'model' if m.role == 'assistant' else m.role %}
    {{- '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# Mistral v3 (tekken): no role tokens but [INST]; tools and the system message move to the last user turn.
MISTRAL3 = """
{%- if messages[0].role == 'system' %}{%- set first = messages[0].content + '\\n\\n' %}{%- set rest = messages[1:] %}
{%- else %}{%- set first = '' %}{%- set rest = messages %}{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in rest %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{{- bos_token }}
{%- for m in rest %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}{{- '[AVAILABLE_TOOLS]' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + (first if loop.index0 == ns.last else '') + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs have 9 characters') }}{%- endif %}
            {{- ', ' if not loop.first }}
            {{- '{"name": "' + call.function.name + '", "arguments": ' ~ (call.function.arguments | tojson) }}
            {{- ', "id": "' + call.id + '"}' }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- m.content | trim + eos_token }}{%- endif %}
{%- endfor %}"""

# Mistral v7 and later: the system message has its own tokens and stays in front.
MISTRAL7 = """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
    {%- elif m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' ~ (call.function.arguments | tojson) }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}"""

# gpt-oss (harmony): channels; the last answer ends with <|return|>, earlier ones with <|end|>, calls with <|call|>.
HARMONY = """
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if messages[0].role in ['system', 'developer'] %}{%- set rest = messages[1:] %}
    {{- '<|start|>developer<|message|># Instructions\\n\\n' + messages[0].content + '<|end|>' }}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- set ns = namespace(name='') %}
{%- for m in rest %}
    {%- if m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson }}{{- '<|end|>' }}
    {%- elif m.tool_calls %}
        {%- set call = m.tool_calls[0].function %}{%- set ns.name = call.name %}
        {%- set later = rest[loop.index:] | selectattr('role', 'equalto', 'assistant') | rejectattr('tool_calls') %}
        {%- if m.thinking and not later | list %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson }}{{- '<|call|>' }}
    {%- else %}
        {%- if loop.last and not add_generation_prompt %}
            {%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
        {%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

# DeepSeek-V3 and R1: full-width bars; R1 opens the thought in the prompt and forgets it; arguments are JSON text.
DEEPSEEK = """
{%- set ns = namespace(tool=false) %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- m.content }}
    {%- elif m.role == 'user' %}{%- set ns.tool = false %}{{- '<｜User｜>' + m.content }}
    {%- elif m.tool_calls %}
        {{- '<｜Assistant｜>' + m.content + '<｜tool▁calls▁begin｜>' }}
        {%- for call in m.tool_calls %}
            {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
            {{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif m.role == 'tool' %}{%- set ns.tool = true %}
        {{- '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + m.content }}
        {{- '<｜tool▁output▁end｜><｜tool▁outputs▁end｜>' }}
    {%- else %}
        {{- ('' if ns.tool else '<｜Assistant｜>') + SAID + '<｜end▁of▁sentence｜>' }}{%- set ns.tool = false %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.tool %}{{- '<｜Assistant｜>OPEN' }}{%- endif %}"""
DEEPSEEK3 = DEEPSEEK.replace("SAID", "m.content").replace("OPEN", "")
R1 = DEEPSEEK.replace("SAID", "m.content.split('</think>')[-1]").replace("OPEN", "<think>\\n")

# DeepSeek-V3.1: a thought is closed in the header where there is none, by the switch `thinking`.
DEEPSEEK31 = """
{%- if not thinking is defined %}{%- set thinking = false %}{%- endif %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' %}
        {{- '<｜Assistant｜></think>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- else %}{{- m.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{%- endif %}"""

# Phi-4: roles set off by a token of their own, no line breaks.
PHI4 = """
{%- for m in messages %}{{- '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{%- endif %}"""

BARS = ["User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep"]
BARS += ["tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end"]
INST = ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
INST += ["[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[TOOL_CONTENT]", "[/TOOL_RESULTS]"]


@dataclass(frozen=True)
class Family:
    """Special tokens of a family: bos, eos, the tokens that end an answer, and the others; whether BOS is added."""

    bos: str
    eos: str
    stops: tuple[str, ...]
    others: tuple[str, ...]
    adds_bos: bool = True

    def tokenizer(self, template):
        """A tokenizer with the template."""
        specials = list(dict.fromkeys([self.bos, self.eos, *self.stops, *self.others]))
        return make_tokenizer(template, specials=specials, bos=self.bos, eos=self.eos, adds_bos=self.adds_bos)

    def stop_ids(self, tokenizer):
        """Ids of the tokens that end an answer."""
        return tuple(tokenizer.convert_tokens_to_ids(stop) for stop in self.stops)


QWEN = Family("<|endoftext|>", "<|im_end|>", ("<|im_end|>", "<|endoftext|>"), ("<|im_start|>",), adds_bos=False)
LLAMA = Family(
    "<|begin_of_text|>",
    "<|eot_id|>",
    ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ("<|start_header_id|>", "<|end_header_id|>"),
)
GEMMA = Family("<bos>", "<eos>", ("<eos>", "<end_of_turn>"), ("<start_of_turn>",))
MISTRAL = Family("<s>", "</s>", ("</s>",), tuple(INST))
GPT_OSS = Family(
    "<|startoftext|>",
    "<|return|>",
    ("<|return|>", "<|endoftext|>", "<|call|>"),
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
    adds_bos=False,
)
SENTENCE = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
DEEPSEEKS = Family(*SENTENCE, (SENTENCE[1],), tuple(f"<｜{name}｜>" for name in BARS))
PHI = Family("<|endoftext|>", "<|im_end|>", ("<|endoftext|>", "<|im_end|>"), ("<|im_start|>", "<|im_sep|>"), False)
