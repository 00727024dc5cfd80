"""What the embedded model should not have said in its own answers is found."""

import random

import pytest
from tokenizers import Tokenizer

from models.tiny.evaluate import MODEL_FOLDER
from models.tiny.training.negatives import Asker, repeated

VERSE = "床前明月光，\n疑是地上霜。\n举头望明月，\n低头思故乡。"
EOS = 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def asker(tokenizer: Tokenizer) -> Asker:
    return Asker(tokenizer)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def test_repeated_marks_ends_of_runs() -> None:
    phrase = list(range(6))
    assert not any(repeated([*phrase, 9, *phrase[:5]]))
    assert repeated([*phrase, 9, *phrase]) == [False] * 12 + [True]
    assert repeated([1, 2, 3, 4, 9, 1, 2, 3, 4, 8, 1, 2, 3, 4])[-1]


def test_a_good_quatrain_has_no_marks(tokenizer: Tokenizer, asker: Asker) -> None:
    prompt = encode(tokenizer, "写一首关于月夜的五言绝句。")
    assert not any(asker.marks(prompt, [*encode(tokenizer, VERSE), EOS]))


def test_the_first_wrong_token_of_a_quatrain_is_marked(tokenizer: Tokenizer, asker: Asker) -> None:
    answer = [*encode(tokenizer, VERSE), EOS]
    assert asker.misformed([*answer[:5], *encode(tokenizer, "月"), *answer[5:]], 5) == 5
    assert asker.misformed(answer, 7) == 5
    assert asker.misformed(encode(tokenizer, "江上moon"), 7) == 2
    marks = asker.marks(encode(tokenizer, "来一首写江上的七言绝句吧。"), encode(tokenizer, "江上moon"))
    assert marks.index(True) == 2
    assert marks.count(True) == 1


def test_the_form_asked_for_is_read_from_the_prompt(tokenizer: Tokenizer, asker: Asker) -> None:
    assert asker.lines_asked(encode(tokenizer, "写一首五言绝句。")) == 5
    assert asker.lines_asked(encode(tokenizer, "写一首七言绝句。")) == 7
    assert asker.lines_asked(encode(tokenizer, "Tell me a story about seven mice.")) is None


def test_prompts_end_where_the_answer_begins(tokenizer: Tokenizer, asker: Asker) -> None:
    import numpy as np

    user, assistant = tokenizer.token_to_id("<｜User｜>"), tokenizer.token_to_id("<｜Assistant｜>")
    texts = ["Tell me a story." + " and" * 150, "写一首五言绝句。", "Hi!"]
    rows = np.full((3, 512), 2)
    for row, text in zip(rows, texts, strict=True):
        question, _, rest = text.partition(" and")
        ids = [0, user, *encode(tokenizer, question), assistant, *encode(tokenizer, rest or "Yes."), EOS, 0]
        row[: len(ids)] = ids
    prompts = asker.prompts(rows, 8, random.Random(0))
    assert len(prompts) == 8
    assert sum(asker.lines_asked(prompt) == 5 for prompt in prompts) == 2
    assert all(prompt[0] == 0 and prompt[-1] == assistant for prompt in prompts)
