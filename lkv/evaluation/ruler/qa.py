"""Questions over documents: the needed ones among those of other questions."""

import random

from lkv.evaluation.ruler.definitions import QUESTIONS
from lkv.evaluation.ruler.draft import Draft
from lkv.evaluation.ruler.readers import Question, QuestionSet


def order(seed: str, questions: QuestionSet) -> list[Question]:
    """The questions in the order in which they are asked."""
    return random.Random(seed).sample(questions.asked, len(questions.asked))


def draft(seed: str, question: Question, documents: tuple[str, ...]) -> Draft:
    """One unit is a document: first those needed, then the question's own others, then any.

    Officially a HotpotQA question always has all ten of its own, and no example exists below them; here those not
    needed give way at short lengths.
    """
    rng = random.Random(seed)
    given = {*question.needed, *question.near}
    ranked = [
        *question.needed,
        *rng.sample(question.near, len(question.near)),
        *rng.sample(rest := [i for i in range(len(documents)) if i not in given], len(rest)),
    ]

    def context(units: int) -> str:
        chosen = ranked[:units]
        random.Random(f"{seed}-order").shuffle(chosen)
        text = "\n\n".join(f"Document {i}:\n{documents[at]}" for i, at in enumerate(chosen, 1))
        return QUESTIONS.before_question.format(context=text)

    return Draft(
        context=context,
        question=QUESTIONS.question.format(query=question.text),
        answer_prefix=QUESTIONS.prefix,
        answers=question.answers,
        least=len(question.needed),
        most=len(documents),
    )
