"""The figures of scripts/demo-llm as a table, as a picture, and as parts of pages."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

COLUMNS = 100
#: Programs that run or wait, for each core: above this the times are not those of the machine.
IDLE_LOAD = 0.5
BEGIN, END = "<!-- scripts/demo-llm: begin -->", "<!-- scripts/demo-llm: end -->"
PICTURE = "demo.svg"
#: A bar is never thinner than this: a short time is not none.
THIN = 3


@dataclass(frozen=True)
class Language:
    """The words of a table. `rows` has them in the order of the table."""

    rows: dict[str, str]
    head: tuple[str, str, str]
    read: str
    tier: str


ENGLISH = Language(
    rows={
        "computed": "without Larder: computed",
        "l1": "without Larder, asked again: from L1",
        "restarted": "without Larder, after a restart: computed",
        "stored": "with Larder: computed, and written to the store",
        "l3": "with Larder, after a restart: from L3",
    },
    head=("one question about {tokens:,} tokens", "first token after", "tokens read instead of computed"),
    read="{read:,}{tier}",
    tier=" from {name}",
)
CHINESE = Language(
    rows={
        "computed": "不用 Larder：计算",
        "l1": "不用 Larder，再问一次：从 L1 读取",
        "restarted": "不用 Larder，重启之后：计算",
        "stored": "用 Larder：计算，并写入存储",
        "l3": "用 Larder，重启之后：从 L3 读取",
    },
    head=("同一个问题，{tokens:,} token", "首 token 时间", "读取而非计算的 token"),
    read="{read:,}{tier}",
    tier="（{name}）",
)


def ordered(figures: dict, rows=ENGLISH.rows) -> list[dict]:
    found = {row["name"]: row for row in figures["rows"]}
    return [found[name] for name in rows]


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def tiers(row: dict) -> str:
    """The tiers that gave the tokens which were not computed."""
    above, l3 = row["cached_tokens"] - row["l3_tokens"], row["l3_tokens"]
    return " and ".join(name for name, tokens in (("L1", above), ("L3", l3)) if tokens)


def table(figures: dict, language: Language = ENGLISH) -> str:
    """As Markdown, with columns that a terminal shows in line too."""
    lines = [[text.format(tokens=figures["prompt_tokens"]) for text in language.head]]
    for row in ordered(figures):
        name = tiers(row)
        tier = language.tier.format(name=name) if name else ""
        read = language.read.format(read=row["cached_tokens"], tier=tier)
        lines.append([language.rows[row["name"]], seconds(row["ttft_seconds"]), read])
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    padded = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
    return "\n".join([padded[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *padded[1:]])


def is_busy(figures: dict) -> bool:
    return figures["load_per_core"] > IDLE_LOAD


def place(figures: dict) -> str:
    """The machine, the engine and the date."""
    device = figures["gpu"] or "without a GPU"
    busy = f", beside other programs ({figures['load_per_core']} for each core)" if is_busy(figures) else ""
    return f"{figures['engine']}, {figures['model']}, {figures['machine']}{busy}, {device}, {figures['date']}"


def is_good(figures: dict) -> bool:
    """Whether the last row came from L3, with the words of L1."""
    return figures["same_words"] and ordered(figures)[-1]["l3_tokens"] > figures["prompt_tokens"] / 2


def verdict(figures: dict) -> str:
    same = "yes" if figures["same_words"] else "NO"
    few = "" if is_good(figures) or not figures["same_words"] else " But too few tokens came from L3."
    return f"Same words from L3 after the restart as from L1: {same}.{few}"


def answers(figures: dict) -> str:
    """Each answer once, with the rows that gave it. Answers that were computed as a whole may differ: they round otherwise."""
    found: dict[str, list[str]] = {}
    for row in ordered(figures):
        found.setdefault(row["words"], []).append(ENGLISH.rows[row["name"]])
    lines = [f"Question: {figures['question']}"]
    for words, rows in found.items():
        givers = rows if len(found) > 1 else ["each row"]
        lines += [*(f"Answer, {giver}:" for giver in givers), textwrap.indent(words, "    ")]
    return "\n".join(lines)


def whole(figures: dict) -> str:
    """All that the command prints of a run."""
    parts = [place(figures), *filter(None, [figures["replaced"]]), f"Settings: {figures['settings']}."]
    if figures["restarts"] > 1:
        parts.append(f"After a restart: the median of {figures['restarts']} restarts.")
    return "\n".join([*parts, "", table(figures), "", answers(figures), "", verdict(figures)])


# --- the picture

#: The colours of the card, its edge, and what is on it.
PARTS = ("card", "edge", "text", "quiet", "computed", "l1", "l3")
LIGHT = dict(zip(PARTS, ("#ffffff", "#d0d7de", "#1f2328", "#59636e", "#8c959f", "#54aeff", "#0969da")))
DARK = dict(zip(PARTS, ("#0d1117", "#3d444d", "#e6edf3", "#9198a1", "#656c76", "#1f6feb", "#58a6ff")))
WIDTH, MARGIN, TOP, STEP, BAR = 760, 28, 96, 50, 16
#: Room for the time to the right of the longest bar.
ROOM = 80


def style() -> str:
    def colours(of: dict) -> str:
        fills = " ".join(f".{name} {{ fill: {colour} }}" for name, colour in of.items() if name != "edge")
        return f"{fills} .card {{ stroke: {of['edge']} }}"

    fonts = "text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif; font-size: 14px }"
    sizes = ".title { font-size: 18px; font-weight: 600 } .small { font-size: 12px } .time { font-weight: 600 }"
    return f"{fonts} {sizes} {colours(LIGHT)} @media (prefers-color-scheme: dark) {{ {colours(DARK)} }}"


def picture(figures: dict) -> str:
    """Horizontal bars of the times to the first token, on a card of its own: readable on any background."""
    rows = ordered(figures)
    longest = max(row["ttft_seconds"] for row in rows)
    foot = TOP + STEP * len(rows)
    lines = textwrap.wrap(f"{place(figures)}. {figures['replaced']} {verdict(figures)}", 104)
    height = foot + 18 * len(lines) + 14
    title = "Time to the first token"
    question = f"One question about a document, {figures['prompt_tokens']:,} tokens"
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">',
        f"<title>{title}: {escape(question)}</title>",
        f"<style>{style()}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="text title" x="{MARGIN}" y="40">{title}</text>',
        f'<text class="quiet" x="{MARGIN}" y="64">{escape(question)}</text>',
    ]
    for at, row in enumerate(rows):
        y = TOP + STEP * at
        kind = {"l1": "l1", "l3": "l3"}.get(row["name"], "computed")
        width = max(THIN, round((WIDTH - 2 * MARGIN - ROOM) * row["ttft_seconds"] / longest))
        label = escape(ENGLISH.rows[row["name"]])
        drawn += [
            f'<text class="text" x="{MARGIN}" y="{y}">{label}</text>',
            f'<rect class="{kind}" x="{MARGIN}" y="{y + 7}" width="{width}" height="{BAR}" rx="2"/>',
            f'<text class="text time" x="{MARGIN + width + 8}" y="{y + 20}">{seconds(row["ttft_seconds"])}</text>',
        ]
    for at, line in enumerate(lines):
        drawn.append(f'<text class="quiet small" x="{MARGIN}" y="{foot + 6 + 18 * at}">{escape(line)}</text>')
    return "\n".join([*drawn, "</svg>", ""])


# --- parts of pages


def filled(text: str) -> str:
    return textwrap.fill(text, COLUMNS, break_long_words=False, break_on_hyphens=False)


def of_readme(figures: dict) -> str:
    without = "" if figures["gpu"] else " Without a GPU parts of the server are replaced."
    words = "the words" if figures["same_words"] else "OTHER WORDS THAN THOSE"
    medians = f" Medians of {figures['restarts']} restarts." if figures["restarts"] > 1 else ""
    return f"{table(figures)}\n\n" + filled(
        f"Printed by `scripts/demo-llm`: {place(figures)}.{medians}{without} The answer from L3 has {words} of the answer from L1. "
        "How it was measured: [docs/start/demo.md](docs/start/demo.md)."
    )


def of_chinese_readme(figures: dict) -> str:
    device = figures["gpu"] or "没有 GPU，服务的一部分因此被替换"
    busy = f"（另有其他程序在运行，每核 {figures['load_per_core']} 个）" if is_busy(figures) else ""
    same = "相同" if figures["same_words"] else "不同"
    where = f"{figures['engine']}，{figures['model']}，{figures['machine']}{busy}，{device}，{figures['date']}"
    said = f"由 `scripts/demo-llm` 打印：{where}。重启后从 L3 得到的回答与从 L1 得到的回答用词{same}。"
    return f"{table(figures, CHINESE)}\n\n{said}测量方法：[docs/start/demo.md](../start/demo.md)。"


def of_page(figures: dict) -> str:
    return f"![Bars: the times of the table]({PICTURE})\n\n```text\n{whole(figures)}\n```"


#: By page: what it has between its marks.
PAGES = {"README.md": of_readme, "docs/zh/README.md": of_chinese_readme, "docs/start/demo.md": of_page}


def with_part(page: str, part: str) -> str:
    """A page with another text between its marks."""
    before, begin, rest = page.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no marks: {BEGIN} and {END}")
    return f"{before}{begin}\n{part}\n\n{end}{after}"


def write_pages(root: Path, figures: dict) -> None:
    for name, part in PAGES.items():
        page = root / name
        page.write_text(with_part(page.read_text(encoding="utf-8"), part(figures)), encoding="utf-8")
    (root / "docs/start" / PICTURE).write_text(picture(figures), encoding="utf-8")
