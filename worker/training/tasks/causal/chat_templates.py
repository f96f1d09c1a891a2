"""Chat templates that a job gives (`data.chat_template`), in place of the tokenizer's.

Those with a name are the formats that base models are commonly taught, written as transformers' templates are. Each
ends a reply with a token of its own format, which the tokenizer must have as a special one, or with its end token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from jobs.errors import Rejected
from jobs.spec import CHAT_TEMPLATE_CHARACTERS, JobSpec, NamedChatTemplate
from worker.training.rows.sources import find_path, named_errors
from worker.training.settings import TrainerSettings

_PARAM = "data.chat_template"
_WITH_SYSTEM_IN_FIRST = (
    "{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
)
"""For formats without a role of the system: what it says stands at the beginning of the user's first turn."""
NAMED: Mapping[NamedChatTemplate, str] = {
    "alpaca": "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content + '\\n\\n' }}"
    "{% elif message.role == 'user' %}{{ '### Instruction:\\n' + message.content + '\\n\\n' }}"
    "{% elif message.role == 'assistant' %}{{ '### Response:\\n' + message.content + eos_token + '\\n\\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}",
    "chatml": "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "gemma": "{{ bos_token }}" + _WITH_SYSTEM_IN_FIRST + "{% for message in turns %}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}"
    "{{ (system if loop.first else '') + message.content + '<end_of_turn>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
    "llama-3": "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    "mistral": "{{ bos_token }}" + _WITH_SYSTEM_IN_FIRST + "{% for message in turns %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}"
    "{% elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}"
    "{% endif %}{% endfor %}",
    "vicuna": "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content + '\\n\\n' }}"
    "{% elif message.role == 'user' %}{{ 'USER: ' + message.content + '\\n' }}"
    "{% elif message.role == 'assistant' %}{{ 'ASSISTANT: ' + message.content + eos_token + '\\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
}


def chat_template(spec: JobSpec) -> str | None:
    """Jinja; None: the tokenizer's own, or the file that `with_chat_template` reads."""
    given = spec.data.chat_template
    if given is None or spec.data.chat_template_file is not None:
        return None
    return NAMED[given] if given in get_args(NamedChatTemplate) else given  # type: ignore[index]  # it is one


def with_chat_template(spec: JobSpec, settings: TrainerSettings) -> JobSpec:
    """The job with the text in place of the file that it names.

    Raises Rejected (`path_outside_data`, `chat_template`), BadData (`file_missing`, `file_unreadable`).
    """
    if (name := spec.data.chat_template_file) is None:
        return spec
    path = find_path(settings.data, name, _PARAM)
    with named_errors(path, name, _PARAM), open(path, "rb") as file:
        content = file.read(4 * CHAT_TEMPLATE_CHARACTERS + 1)
    text = content.decode("utf-8-sig", "replace")
    if "\N{REPLACEMENT CHARACTER}" in text or "{" not in text or len(text) > CHAT_TEMPLATE_CHARACTERS:
        raise Rejected(
            f"{_PARAM}: {name} is no chat template",
            code="chat_template",
            param=_PARAM,
            hint=f"give a Jinja template in UTF-8 of at most {CHAT_TEMPLATE_CHARACTERS:,} characters, such as the "
            "chat_template.jinja of a model",
        )
    return spec.model_copy(update={"data": spec.data.model_copy(update={"chat_template": text})})
