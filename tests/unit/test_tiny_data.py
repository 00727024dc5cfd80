"""The embedded model's data preparation: whole poems, fair requests, full rows."""

import lzma
import random
from pathlib import Path

from models.tiny.training import poems, prepare

POEM = poems.Poem("静夜思", ("床前明月光", "疑是地上霜", "举头望明月", "低头思故乡"), 5)


def test_poems_are_mended_and_misfits_dropped(tmp_path: Path) -> None:
    path = tmp_path / "jueju.tsv.xz"
    rows = [
        "dynasty\tauthor\ttitle\tchars_per_line\tpoem",
        "唐\t李白\t静夜思  其一\t5\t床前明月光，疑是地上霜。举头望明月，低头思故乡。。",
        "唐\t李白\t静夜思\t5\t床前明月光，疑是地上霜。举头望明月，低头思故乡。",
        "唐\t某\t缺字\t5\t床前明月□，疑是地上霜。举头望明月，低头思故乡。",
    ]
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(rows) + "\n")
    assert poems.read_poems(path) == [POEM]


def test_a_poem_is_four_lines() -> None:
    assert POEM.text == "床前明月光，\n疑是地上霜。\n举头望明月，\n低头思故乡。"


def test_requests_are_not_the_held_out_ones() -> None:
    requests = poems.Requests([POEM], prepare.eval_prompts())
    worded = requests.word(POEM, random.Random(0), 400)
    assert len(worded) == 400
    assert not set(worded) & prepare.eval_prompts()
    assert any("月" in request or "moon" in request for request in worded)


def test_best_fit_places_every_document_once() -> None:
    rng = random.Random(1)
    lengths = [rng.randrange(4, 513) for _ in range(2000)]
    rows = list(prepare.best_fit(lengths, 512, rng))
    assert sorted(i for row in rows for i in row) == list(range(2000))
    assert all(sum(lengths[i] for i in row) <= 512 for row in rows)
    assert sum(lengths) / (512 * len(rows)) > 0.95


def test_repeats_finds_what_the_score_calls_a_loop() -> None:
    phrase = list(range(8))
    assert prepare.repeats([*phrase, 90, *phrase, 91, *phrase])
    assert not prepare.repeats([*phrase, 90, *phrase, 91])
    assert not prepare.repeats([1, 2, 3])
