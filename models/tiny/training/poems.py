"""Turns the quatrain table into chats: reads and mends the poems, and words the requests for them.

A request names the poem's own title, a pair of its characters, a single image in it, or a theme
that its characters show, so that topics and poems agree. Everything is a function of the random
generator passed in.
"""

from __future__ import annotations

import lzma
import random
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

HAN = r"[\u3400-\u4dbf\u4e00-\u9fff]"
_POEM = {n: re.compile(rf"({HAN}{{{n}}})[，？。！；]" * 3 + rf"({HAN}{{{n}}})[。？！]+") for n in (5, 7)}
_NUMBERED = re.compile(r"\s+其.+$|[一二三四五六七八九十百]+首$")
_TITLE = re.compile(rf"{HAN}{{1,6}}")
_DULL_TITLES = {"诗一首", "偈", "绝句", "句", "颂", "颂古", "失题", "无题", "诗", "口占", "作"}

FORMS = {5: (("五言绝句", 14), ("五绝", 2), ("五言诗", 1)), 7: (("七言绝句", 14), ("七绝", 2), ("七言诗", 1))}

# {t} is the topic, {f} the form.
TITLE_WORDINGS = (
    "请以“{t}”为题写一首{f}。",
    "以“{t}”为题，写一首{f}。",
    "请以《{t}》为题作一首{f}。",
    "写一首{f}，题目是“{t}”。",
    "题为“{t}”的{f}，请写一首。",
    "请写一首题为{t}的{f}。",
    "以{t}为题作{f}一首。",
)
TOPIC_WORDINGS = (
    "写一首关于{t}的{f}。",
    "请写一首关于{t}的{f}。",
    "用中文写一首关于{t}的{f}",
    "用中文写一首写{t}的{f}。",
    "来一首写{t}的{f}吧。",
    "来一首关于{t}的{f}。",
    "我想读一首{f}，主题是{t}。",
    "我想看一首写{t}的{f}。",
    "请作一首咏{t}的{f}。",
    "帮我写一首{f}，写{t}。",
    "能写一首关于{t}的{f}吗？",
    "给我写一首以{t}为主题的{f}。",
    "写{t}，{f}一首。",
    "作一首{f}，主题：{t}",
    "{t}，{f}",
    "请以“{t}”为题写一首{f}。",
    "我想读一首关于{t}的{f}。",
    "给我来一首{t}的{f}",
)
FREE_WORDINGS = ("写一首{f}。", "请写一首{f}", "来一首{f}吧。", "作一首{f}。", "我想读一首{f}。", "用中文写一首{f}")
OPEN_WORDINGS = (
    "写一首关于{t}的诗。",
    "写一首{t}的绝句",
    "请写一首诗，写{t}。",
    "来一首关于{t}的绝句吧。",
    "以“{t}”为题写一首诗。",
)
ENGLISH_WORDINGS = (
    "Write a Chinese quatrain about {t} with {n} characters a line.",
    "Write a {n}-character Chinese quatrain about {t}.",
    "Please write a short Chinese poem about {t}, four lines of {n} characters.",
    "Can you write a Chinese poem about {t} with {n} characters in each line?",
)

IMAGES = "雪柳竹松梅菊莲荷兰桃杏梨桂月雨风云霜露山水江湖海溪泉花草叶酒茶琴棋书画剑舟船桥楼亭寺僧钟渔樵雁燕莺蝉鹤鸥马牛春夏秋冬夜晓暮梦愁乡"
# A theme is offered when a line of its pattern is found in the poem or its title.
THEMES: tuple[tuple[str, str, str], ...] = (
    ("秋天", "秋|西风|落叶|黄叶|菊", "autumn"),
    ("春天", "春|东风|桃李|燕子", "spring"),
    ("夏天", "夏|蝉|荷|暑", "summer"),
    ("冬天", "冬|雪|寒梅|冰", "winter"),
    ("春雨", "春雨|春.{0,12}雨|雨.{0,12}春", "spring rain"),
    ("秋风", "秋风|西风", "the autumn wind"),
    ("秋夜", "秋.{0,12}夜|夜.{0,12}秋", "an autumn night"),
    ("月夜", "月.{0,12}夜|夜.{0,12}月|月明|明月", "a moonlit night"),
    ("明月", "明月|月明", "the bright moon"),
    ("江上", "江上|江头|江水|江边", "the river"),
    ("山寺", "山.{0,12}寺|寺.{0,12}山|僧|禅|钟声", "a mountain temple"),
    ("山中", "山中|深山|空山", "the mountains"),
    ("送别", "送.|别离|离别|相送|别君|分手|客舟", "saying goodbye"),
    ("离别", "别|离", "parting"),
    ("思乡", "故乡|故园|乡心|乡思|归心|归期|家山|思归|客愁|思乡", "missing home"),
    ("旅途", "客|征|驿|行人", "a journey"),
    ("边塞", "塞|胡|戍|单于|玉关|边城|匈奴|烽|将军", "the frontier"),
    ("渔翁", "渔|钓|蓑", "an old fisherman"),
    ("隐居", "隐|柴门|柴扉|茅屋|山居", "a hermit"),
    ("梅花", "梅", "plum blossoms"),
    ("菊花", "菊|重阳|黄花", "chrysanthemums"),
    ("荷花", "荷|莲|藕|芙蓉", "the lotus"),
    ("桃花", "桃", "peach blossoms"),
    ("兰花", "兰", "orchids"),
    ("牡丹", "牡丹", "peonies"),
    ("海棠", "海棠", "crab-apple blossoms"),
    ("落花", "落花|花落|残红", "falling petals"),
    ("杨柳", "柳|杨花", "willows"),
    ("竹林", "竹", "bamboo"),
    ("松树", "松", "pine trees"),
    ("雪景", "雪", "snow"),
    ("西湖", "西湖|湖上|孤山|苏堤", "West Lake"),
    ("登楼", "登.{0,3}楼|楼上|高楼|上楼|倚楼", "climbing a tower"),
    ("登高", "登高|登临|登山", "a high view"),
    ("夜泊", "泊|夜.{0,10}舟|舟.{0,10}夜|系船", "a boat at night"),
    ("落日", "落日|夕阳|斜阳|斜日|日暮|残阳", "the setting sun"),
    ("黄昏", "黄昏|暮", "dusk"),
    ("清晨", "晓|晨|朝", "the morning"),
    ("清明", "清明|寒食|禁烟|上冢", "the Qingming festival"),
    ("中秋", "中秋|桂|嫦娥|姮娥|月圆|团圆", "the Mid-Autumn festival"),
    ("重阳", "重阳|九日|茱萸|登高", "the Double Ninth"),
    ("七夕", "七夕|牛女|鹊桥|银河", "the Seventh Night"),
    ("归雁", "雁", "wild geese"),
    ("燕子", "燕", "swallows"),
    ("蝉", "蝉", "cicadas"),
    ("古道", "古道|古路|驿路|长亭|驿", "an old road"),
    ("怀古", "六朝|吴王|越王|汉|秦|故宫|前朝|兴亡", "old kingdoms"),
    ("饮酒", "酒|醉|樽|杯", "wine"),
    ("喝茶", "茶", "tea"),
    ("友情", "故人|知己|友", "a friend"),
    ("相思", "相思|思君|忆君", "longing"),
    ("读书", "读书|书", "reading"),
    ("田园", "田|农|桑|麦|稻|耕", "the fields"),
    ("小溪", "溪", "a stream"),
    ("瀑布", "瀑|飞泉", "a waterfall"),
    ("大海", "海", "the sea"),
    ("下雨", "雨", "rain"),
    ("梦", "梦", "a dream"),
    ("孤独", "孤|独", "being alone"),
    ("故乡", "故乡|故园|乡", "the old home"),
    ("花", "花", "flowers"),
    ("月亮", "月", "the moon"),
    ("春风", "春风|东风", "the spring wind"),
    ("春日", "春日|春晴|春光", "a spring day"),
    ("雨夜", "雨.{0,12}夜|夜.{0,12}雨", "a rainy night"),
    ("风", "风", "the wind"),
    ("白云", "白云|云", "clouds"),
)


@dataclass(frozen=True, slots=True)
class Poem:
    title: str  # without numbering; may be empty
    lines: tuple[str, str, str, str]  # characters only, each of `chars_per_line`
    chars_per_line: int

    @property
    def text(self) -> str:
        """Four lines, one under the other."""
        a, b, c, d = self.lines
        return f"{a}，\n{b}。\n{c}，\n{d}。"


def read_poems(path: Path) -> list[Poem]:
    """Read jueju.tsv.xz; drops what is not four equal lines of known characters, and a doubled full stop."""
    poems: list[Poem] = []
    seen: set[tuple[str, ...]] = set()
    with lzma.open(path, "rt", encoding="utf-8") as rows:
        next(rows)
        for row in rows:
            _, _, title, chars, text = row.rstrip("\n").split("\t")
            match = _POEM[int(chars)].fullmatch(text)
            if match is None or match.groups() in seen:
                continue
            seen.add(match.groups())
            title = _NUMBERED.sub("", title.strip()).strip()
            a, b, c, d = match.groups()
            poems.append(
                Poem(title if _TITLE.fullmatch(title) and title not in _DULL_TITLES else "", (a, b, c, d), int(chars))
            )
    return poems


def covered(poems: Sequence[Poem], characters: Collection[str]) -> list[Poem]:
    """The poems all of whose characters are in `characters`; a title that is not covered is left out."""
    kept: list[Poem] = []
    for poem in poems:
        if all(char in characters for line in poem.lines for char in line):
            title = poem.title if all(char in characters for char in poem.title) else ""
            kept.append(Poem(title, poem.lines, poem.chars_per_line))
    return kept


def _pairs(poem: Poem) -> list[str]:
    """Pairs of characters that stand together in the metre: places 1-2 and 3-4, and in sevens 6-7 too."""
    starts = (0, 2) if poem.chars_per_line == 5 else (0, 2, 5)
    return [line[i : i + 2] for line in poem.lines for i in starts]


class Requests:
    """Words requests for poems; built once over all poems, since a pair must be common to be a topic."""

    def __init__(self, poems: Sequence[Poem], held_out: Collection[str], min_pair_count: int = 20) -> None:
        counts = Counter(pair for poem in poems for pair in set(_pairs(poem)))
        self._common = {pair for pair, count in counts.items() if count >= min_pair_count}
        self._themes = [(name, re.compile(pattern), english) for name, pattern, english in THEMES]
        self._held_out = frozenset(held_out)

    def word(self, poem: Poem, rng: random.Random, count: int) -> list[str]:
        """`count` requests that `poem` answers; none of them a held-out prompt."""
        whole = poem.title + "|" + "|".join(poem.lines)
        themes = [(name, english) for name, pattern, english in self._themes if pattern.search(whole)]
        topics = [name for name, _ in themes] * 2 + [pair for pair in _pairs(poem) if pair in self._common]
        topics += [char for char in IMAGES if char in whole]
        prompts: list[str] = []
        while len(prompts) < count:
            prompt = self._word(poem, themes, topics, rng)
            if prompt not in self._held_out:
                prompts.append(prompt)
        return prompts

    def _word(self, poem: Poem, themes: list[tuple[str, str]], topics: list[str], rng: random.Random) -> str:
        names, weights = zip(*FORMS[poem.chars_per_line], strict=True)
        form = rng.choices(names, weights)[0]
        draw = rng.random()
        if draw < 0.25 and poem.title:
            return rng.choice(TITLE_WORDINGS).format(t=poem.title, f=form)
        if draw > 0.97 and themes:
            _, english = rng.choice(themes)
            return rng.choice(ENGLISH_WORDINGS).format(t=english, n={5: "five", 7: "seven"}[poem.chars_per_line])
        if not topics or draw > 0.95:
            return rng.choice(FREE_WORDINGS).format(f=form)
        topic = rng.choice(topics)
        if draw > 0.91:
            return rng.choice(OPEN_WORDINGS).format(t=topic)
        return rng.choice(TOPIC_WORDINGS).format(t=topic, f=form)


# Short Chinese chats, written by hand: (what may be said, what may be answered).
SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("你好", "你好！", "您好", "嗨", "早上好", "晚上好", "你好啊", "哈喽", "你好吗？", "在吗"),
        (
            "你好！我是 Rorqual-Tiny，一个很小的演示模型。想读一首绝句吗？",
            "你好！我会写绝句。试试：“写一首关于春天的七言绝句。”",
            "你好！我的中文很少，只会写绝句。",
        ),
    ),
    (
        (
            "你是谁？",
            "你是谁",
            "你叫什么名字？",
            "介绍一下自己",
            "你是什么模型？",
            "请介绍一下你自己。",
            "你是哪个模型",
            "你叫什么",
        ),
        (
            "我是 Rorqual-Tiny，一个很小的语言模型。",
            "我叫 Rorqual-Tiny，是一个小小的演示模型，会写绝句。",
            "我是 Rorqual-Tiny。我很小，常常出错，只会写绝句和简单的英文。",
        ),
    ),
    (
        ("你会什么？", "你能做什么？", "你会做什么", "你可以帮我做什么？", "你有什么用？", "怎么用你？"),
        ("我会写五言绝句和七言绝句，也能用英文讲小故事。", "我会写绝句。试试：“写一首关于明月的五言绝句。”"),
    ),
    (
        ("你是 DeepSeek 吗？", "你是ChatGPT吗？", "你是大模型吗？", "你是 GPT 吗", "你是DeepSeek吗"),
        ("不是。我是 Rorqual-Tiny，一个很小的演示模型。", "不，我叫 Rorqual-Tiny，比它们小得多。"),
    ),
    (
        ("谢谢", "谢谢你", "谢谢！", "写得真好", "好诗！", "多谢", "真不错"),
        ("不客气！", "谢谢！还想再读一首吗？", "不客气，想再读一首吗？"),
    ),
    (("再见", "再见！", "拜拜", "晚安", "明天见"), ("再见！", "再见，欢迎再来。", "再见，祝你好梦。")),
    (
        (
            "今天天气怎么样？",
            "现在几点了？",
            "一加一等于几？",
            "讲个笑话",
            "讲一个故事",
            "中国的首都是哪里？",
            "帮我写代码",
            "什么是人工智能？",
        ),
        ("抱歉，我的中文很少，只会写绝句。", "这个我不会。我可以写一首绝句，或者用英文讲个小故事。"),
    ),
)
