"""Where an answer begins, for the chat templates of each family: the same in training, evaluation and use."""

import pytest

from lkv.errors import PromptError
from lkv.evaluation.example import Example, make_prompt
from lkv.training.data.samples import Continuation, Sample, tokenize_sample
from lkv.utils.prompts import chat_template_parts, encode_context, encode_question
from tests.evaluation.test_protocol import byte_tokenizer

# Made up after each family's: its markers, what it does with a system turn, whether it strips and whether it thinks.
_TURNS = "{% for m in messages %}"
TEMPLATES = {
    "llama": (
        "<s>[system]Today: 26 Jul 2024[end]" + _TURNS + "[{{ m['role'] }}]\n\n{{ m['content'] | trim }}[end]"
        "{% endfor %}{% if add_generation_prompt %}[assistant]\n\n{% endif %}",
        "[end][assistant]\n\n",
    ),
    "qwen2": (
        "{% if messages[0]['role'] != 'system' %}[system\nBe helpful.]\n{% endif %}" + _TURNS + "[{{ m['role'] }}\n"
        "{{ m['content'] }}]\n{% endfor %}{% if add_generation_prompt %}[assistant\n{% endif %}",
        "]\n[assistant\n",
    ),
    "qwen3": (
        _TURNS + "[{{ m['role'] }}\n{{ m['content'] }}]\n{% endfor %}{% if add_generation_prompt %}[assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
        "]\n[assistant\n<think>\n\n</think>\n\n",
    ),
    "mistral": ("<s>" + _TURNS + "[INST] {{ m['content'] }} [/INST]{% endfor %}", " [/INST]"),
    "gemma": (
        "<s>" + _TURNS + "<turn>{{ m['role'] }}\n{{ m['content'] | trim }}</turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>model\n{% endif %}",
        "</turn>\n<turn>model\n",
    ),
    "phi": (
        _TURNS + "<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}{{ '<|assistant|>\n' }}",
        "<|end|>\n<|assistant|>\n",
    ),
    "none": (None, "\nAnswer:"),
}  # fmt: skip


@pytest.mark.parametrize("family", TEMPLATES)
def test_training_and_evaluation_put_the_answer_at_one_place(family):
    template, after = TEMPLATES[family]
    tokenizer = byte_tokenizer(template)
    assert chat_template_parts(tokenizer)[2] == after
    context, question = "The tower is old.", "How old?"
    trained = tokenize_sample(Sample("s", context, (Continuation(question, "Very"),)), tokenizer, 500, 500)
    (ids, skip), = trained.continuations  # fmt: skip
    assert tokenizer.decode(ids[:skip]).endswith(after) and tokenizer.decode(ids[skip:]).startswith("Very")
    assert ids[:skip] == encode_question(tokenizer, question)
    assert trained.context == encode_context(tokenizer, context)
    if template is None:
        return  # evaluations write their own question forms where there is no template
    # An evaluated question brings its line breaks with it; the paper's answers begin where the template ends.
    for protocol in ("kvpress", "longbench"):
        example = Example("ruler", "niah", 0, context, "\n\n" + question, "", ("Very",), 5, "string_match_all")
        prompt = make_prompt(example, tokenizer, protocol, 900)
        assert (prompt.context, prompt.question) == (trained.context, ids[:skip])


@pytest.mark.parametrize("template", ["no turn at all", "{{ messages[0]['content'] }}{{ messages[0]['content'] }}"])
def test_a_template_that_loses_or_repeats_the_text_is_refused(template):
    with pytest.raises(PromptError, match="does not carry the user's text exactly once"):
        chat_template_parts(byte_tokenizer(template))
