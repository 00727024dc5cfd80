"""The embedded model's scores count what they say they count."""

import pytest

from models.tiny import scoring
from models.tiny.evaluate import MODEL_FOLDER, Answer, Prompt, read_prompts, score


def test_a_loop_is_an_eight_gram_three_times() -> None:
    phrase = list(range(8))
    assert scoring.loops([*phrase, 90, *phrase, 91, *phrase])
    assert not scoring.loops([*phrase, 90, *phrase, 91, *phrase[:7]])
    assert not scoring.loops([])


def test_overlapping_occurrences_count() -> None:
    assert scoring.loops([5] * 10)
    assert not scoring.loops([5] * 9)


@pytest.mark.parametrize(
    ("text", "chars", "good"),
    [
        ("床前明月光，\n疑是地上霜。\n举头望明月，\n低头思故乡。", 5, True),
        ("床前明月光，疑是地上霜。举头望明月，低头思故乡。", 5, True),
        ("床前明月光，疑是地上霜。举头望明月，低头思故乡。", 7, False),
        ("床前明月光，疑是地上霜。举头望明月，低头思故。", 5, False),
        ("床前明月光，疑是地上霜。举头望明月。", 5, False),
        ("床前明月光，疑是地上霜。举头望明月，低头思故乡。好", 5, False),
        ("床前明月光，疑是地上霜。举头望moon，低头思故乡。", 5, False),
        ("朝辞白帝彩云间，千里江陵一日还。两岸猿声啼不住，轻舟已过万重山。", 7, True),
        ("", 5, False),
    ],
)
def test_quatrain_form(text: str, chars: int, good: bool) -> None:
    assert scoring.is_quatrain(text, chars) is good


def test_agreement_compares_the_draft_with_the_next_argmax() -> None:
    # Tokens 0..4; main[i] is for i+1, draft[i] for i+2: drafts at 0, 1, 2 meet main at 1, 2, 3.
    assert scoring.agreement([9, 1, 2, 3, 9], [1, 2, 7, 8, 8]) == (2, 3)
    assert scoring.agreement([1, 2], [1, 2]) == (0, 0)
    with pytest.raises(ValueError):
        scoring.agreement([1, 2, 3, 4], [1, 2, 3])


def test_score_keeps_the_languages_apart() -> None:
    prompts = [Prompt("a", None), Prompt("b", None), Prompt("c", 5)]
    answers = [
        Answer("fine", [7, 1], True),
        Answer("no end", [5] * 300, False),
        Answer("床前明月光，疑是地上霜。举头望明月，低头思故乡。", [4] * 24, True),
    ]
    assert score(prompts, answers) == {"english_stop": 0.5, "english_loops": 1, "quatrain_form": 1.0}


def test_the_prompts_are_a_hundred_and_fifty() -> None:
    prompts = read_prompts(MODEL_FOLDER / "eval-prompts.jsonl")
    assert sum(p.chars_per_line is None for p in prompts) == 100
    assert sum(p.chars_per_line in {5, 7} for p in prompts) == 50
