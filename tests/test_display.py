"""What a report looks like, and that nothing in a user's program can change what the page is."""

from __future__ import annotations

import html.parser
import re

import pytest
from expecttest import assert_expected_inline
from report_samples import BEFORE, fused, graph, missed, sample

from fxfuse import display, page
from fxfuse.display import compact, esc, plain, ranges
from fxfuse.report import Failure, Report

ATTACK = "<img src=x onerror=alert(1)>"


# ------------------------------------------------------------------------------------------------ text


def test_text() -> None:
    assert_expected_inline(
        str(sample()),
        """\
fxfuse: 5 fused, 2 missed (best: linear_gelu 3/4, gelu: pattern has approximate 'none', model has 'tanh'), 1 failed
graphs: 1 joint, 1 inference; 362 nodes, rewritten in 8.4 ms, recipe default

layer             fusion          passes            saved    kernel  source
layers.{0-3}.mlp  linear_gelu x4  forward+backward  addmm_*  inline  net.py:12 F.gelu(self.fc(x))
head              linear_add      forward           -        inline  net.py:40

missed (of the pattern's values, so many were found)
  3/4  linear_gelu x2: gelu: pattern has approximate 'none', model has 'tanh'
       layers.{4,5}.mlp, node gelu_9, joint  net.py:31 F.gelu(y, approximate='tanh')

failed (the unfused form ran)
  launch  gated_mlp_silu  RuntimeError: out of shared memory at k.py:3""",
    )


def test_text_of_an_empty_report() -> None:
    assert str(Report()) == "fxfuse: no graph was captured"
    assert str(Report([graph()])).startswith("fxfuse: 0 fused, 0 missed\ngraphs: 1 joint")


def test_equal_refusals_are_told_once_whatever_the_node_numbers() -> None:
    misses = tuple(missed(layer=f"h.{i}", node=f"gelu_{i}", reason=f"view_{i} is used by cos") for i in range(9))
    assert "3/4  linear_gelu x9: view_0 is used by cos\n       h.{0-8}, node gelu_0" in str(Report([graph(missed=misses)]))


def test_many_refusals_are_cut_and_named() -> None:
    text = str(Report([graph(missed=tuple(missed(name=f"f{i}") for i in range(20)))]))
    assert text.count("\n  3/4  ") == display.MISSES
    assert text.endswith("further off: f12, f13, f14, f15, f16, f17, f18, f19")


def test_a_pattern_of_which_little_was_found_is_named_but_not_counted() -> None:
    text = str(Report([graph(missed=(missed(), missed(name="far", matched=1, total=9)))]))
    assert text.startswith("fxfuse: 0 fused, 1 missed (best: linear_gelu") and text.endswith("further off: far")


def test_a_miss_inside_a_fused_region_is_not_news() -> None:
    assert "linear_relu" not in str(sample())


def test_fusions_of_one_layer_stand_together() -> None:
    regions = tuple(
        fused(layer=f"h.{i}.{part}", name=name) for i in range(2) for part, name in (("a", "f"), ("b", "g"), ("a", "k"))
    )
    rows = [(row.layers, row.first.name) for row in display.groups(Report([graph(fused=regions)]))]
    assert rows == [("h.{0,1}.a", "f"), ("h.{0,1}.a", "k"), ("h.{0,1}.b", "g")]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (["layers.0.mlp", "layers.1.mlp", "layers.3.mlp"], "layers.{0,1,3}.mlp"),
        ([f"layers.{i}.mlp" for i in range(32)], "layers.{0-31}.mlp"),
        (["layers.7.mlp", "layers.7.mlp"], "layers.7.mlp"),
        ([f"b.{i}.e.{j}" for i in range(2) for j in range(4)], "b.{0,1}.e.{0-3}"),
        (["b.0.e.0", "b.0.e.1", "b.1.e.5"], "b.0.e.{0,1}, b.1.e.5"),
        (["x.0.a.0.c", "x.0.a.1.d", "x.0.a.2.c"], "x.0.a.{0,2}.c, x.0.a.1.d"),
        (["e.0.0.0", "e.0.1.1"], "e.0.0.0, e.0.1.1"),
        (["head", "layers.0"], "head, layers.0"),
        (["", ""], "-"),
        ([], "-"),
        (["a.²", "a." + "9" * 5000], "a.², a." + "9" * 5000),
    ],
)
def test_compact(layers: list[str], expected: str) -> None:
    assert compact(layers) == expected


def test_ranges() -> None:
    assert ranges([1, 2, 3, 5, 7, 8, 9, 10]) == "1,2,3,5,7-10"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a\n  b\tc", "a b c"),
        ("\x1b[2Jx\x07", "\\x1b[2Jx\\x07"),
        ("a\u202eb\udc80", "a\\u202eb\\udc80"),
        ("/home/alice/my/net.py:12 f(x)", "net.py:12 f(x)"),
        ('File "/opt/v/lib/python3/site-packages/transformers/models/x.py", line 3', 'File "transformers/models/x.py", line 3'),
        ("C:\\Users\\alice\\net.py:3", "net.py:3"),
        ("a / b / c.d", "a / b / c.d"),
        ("x.view(2,-1)//2", "x.view(2,-1)//2"),
        ("relative/net.py:3", "relative/net.py:3"),
    ],
)
def test_plain(value: str, expected: str) -> None:
    assert plain(value) == expected


def test_plain_is_never_wider_than_asked() -> None:
    assert plain("x" * 100, 10) == "xxxxxxx..." and len(plain("\x00" * 100, 10)) == 10


# ------------------------------------------------------------------------------------------------ HTML


def test_one_row_of_the_table() -> None:
    row = display.groups(sample())[0]
    cell = r' align="left" valign="top" style="[^"]*"'
    assert_expected_inline(
        re.sub(cell, "", page.fused_row(0, row)).replace("<td>", "\n<td>"),
        """\
<tr>
<td><mark style="background:#4e79a733;color:inherit"><b>1-4</b> ▌</mark></td>
<td>layers.{0-3}.mlp</td>
<td>linear_gelu</td>
<td>forward+backward</td>
<td>addmm_*</td>
<td>inline</td>
<td>net.py:12 F.gelu(self.fc(x))</td></tr>""",
    )


def panes(text: str) -> list[str]:
    """The code panes of a page, without tags."""
    found = re.findall(r"<pre[^>]*>(.*?)</pre>", text, re.DOTALL)
    return [re.sub(r"<[^>]*>", "", pane) for pane in found]


def test_both_panes_carry_number_bar_and_tint() -> None:
    html = page.fragment(Report([graph(fused=(fused(),))]))
    forward_before, forward_after, backward_before, backward_after = panes(html)
    assert_expected_inline(
        forward_before,
        """\
   def forward(self, primals, tangents):
   primals_1, primals_2, primals_3, tangents_1, = fx_pytree.tree_flatten_spec([primals, tangents], self._in_spec)
1 ▌permute: &quot;f32[8, 16]&quot; = aten.permute.default(primals_1, [1, 0])
1 ▌addmm = aten.addmm.default(primals_2, primals_3, permute)
1 ▌gelu = aten.gelu.default(addmm)
   sin = aten.sin.default(gelu)
   cos = aten.cos.default(gelu)""",
    )
    assert "1 ▌linear_act = fxfuse.linear_act.default(" in forward_after
    assert backward_before.splitlines()[1].startswith("1 ▌gelu_backward")
    assert "1 ▌linear_act_backward" in backward_after
    assert html.count("background:#4e79a733") == 1 + 5 + 4


def test_meaning_survives_without_any_style() -> None:
    html = re.sub(r' style="[^"]*"', "", page.fragment(sample()))
    assert "<b>1</b> ▌" in html and "<details><summary>backward</summary>" in html and "<b>Missed</b>: 2" in html


def test_regions_are_numbered_through_all_graphs() -> None:
    html = page.fragment(Report([graph(fused=(fused(),)), graph(fused=(fused(name="other"),))]))
    assert "<b>2</b> ▌addmm" in html


def test_only_the_first_graph_with_a_fusion_is_open() -> None:
    html = page.fragment(Report([graph(), graph(fused=(fused(),)), graph(fused=(fused(),))]))
    assert html.count("<details open>") == 1
    assert html.index("<b>Graph 1</b>") < html.index("<details open>") < html.index("<b>Graph 2</b>")


def test_a_long_pane_is_cut_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PANE_LINES", 10)
    code = "def forward(self, x):\n" + "".join(f"    a_{i} = torch.ops.aten.sin.default(x)\n" for i in range(5000))
    html = page.fragment(Report([graph(before=code)]))
    assert "... 4,991 more lines, cut here" in html and len(panes(html)[0].splitlines()) == 11


def test_many_graphs_are_cut_with_a_note() -> None:
    html = page.fragment(Report([graph() for _ in range(page.GRAPHS + 3)]))
    assert "... 3 more graphs" in html and html.count("<b>Graph ") == page.GRAPHS


def test_nothing_active_and_nothing_fetched() -> None:
    text = page.page(sample())
    assert not re.search(r"<(script|link|style|iframe|object|svg|img|form|base)\b|\bon\w+=|https?://|url\(|@import", text, re.I)
    assert "default-src 'none'" in text


class _Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, tuple[str, ...]]] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add((tag, tuple(name for name, _ in attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags(report: Report) -> set[tuple[str, tuple[str, ...]]]:
    parser = _Tags()
    parser.feed(page.fragment(report))
    assert not parser.open
    return parser.seen


def hostile(text: str) -> Report:
    """A report with ``text`` in every place that a string can be."""
    region = fused(
        name=text, graph=text, directions=(text,), ops=(text,), source=text, layer=text, saved=(text,), kernel=text, after=(text,)
    )
    miss = missed(name=text, reason=text, node=text, source=text, layer=text, graph=text)
    code = BEFORE + f"    {text} = {text}\n    x = {text}\n"
    record = graph(text, (region,), (miss,), before=code, after=code)
    return Report([record], [Failure(text, text, text)], text, text)


@pytest.mark.parametrize(
    "text", [ATTACK, '"><script>alert(1)</script>', "' onmouseover='alert(1)", "</pre></td><b>", "&lt;b&gt;", "`${x}`"]
)
def test_no_string_of_the_user_becomes_markup(text: str) -> None:
    assert tags(hostile(text)) <= tags(hostile("harmless"))
    assert text not in page.page(hostile(text)) or text == "`${x}`"


@pytest.mark.parametrize("field", ["layer", "name", "source", "kernel"])
def test_an_attack_in_one_field_is_shown_as_text(field: str) -> None:
    assert esc(ATTACK) in page.fragment(Report([graph(fused=(fused(**{field: ATTACK}),))]))


@pytest.mark.parametrize("field", ["layer", "name", "reason", "node", "source"])
def test_an_attack_in_a_miss_is_shown_as_text(field: str) -> None:
    text = page.fragment(Report([graph(missed=(missed(**{field: ATTACK}),))]))
    assert esc(ATTACK) in text and ATTACK not in text


def test_text_never_carries_control_characters() -> None:
    report = hostile("\x1b]0;owned\x07\r\nfake line")
    for text in (str(report), report.why_not("\x1b]0;owned\x07\r\nfake line"), repr(report)):
        assert "\x1b" not in text and "\x07" not in text and "\nfake" not in text


# ------------------------------------------------------------------------------------------------ Mermaid


def test_mermaid_of_a_region() -> None:
    assert_expected_inline(
        sample().to_mermaid("linear_gelu#0"),
        """\
flowchart TD
  subgraph region["linear_gelu in layers.0.mlp: forward+backward, inline"]
    n0["permute<br/>aten.permute.default"]
    n1["addmm<br/>aten.addmm.default"]
    n2["gelu<br/>aten.gelu.default"]
    n3["gelu_backward<br/>aten.gelu_backward.default"]
    n4["mm<br/>aten.mm.default"]
  end
  n5(["primals_1"])
  n6(["primals_2"])
  n7(["primals_3"])
  n8(["mul"])
  n9(["sin"])
  n10(["cos"])
  n11(["output"])
  n5 --> n0
  n6 --> n1
  n7 --> n1
  n0 --> n1
  n1 --> n2
  n8 --> n3
  n1 --> n3
  n3 --> n4
  n7 --> n4
  n2 --> n9
  n2 --> n10
  n4 --> n11
""",
    )


def test_mermaid_takes_the_region_by_number() -> None:
    assert 'region["linear_gelu in layers.2.mlp' in sample().to_mermaid("linear_gelu#2")
    assert 'region["linear_add in head' in sample().to_mermaid("linear_add")


@pytest.mark.parametrize("region", ["linear_gelu#4", "linear_gelu#-1", "linear_gelu#x", "nothing", "linear_gelu#"])
def test_mermaid_of_an_unknown_region_lists_the_known(region: str) -> None:
    with pytest.raises(ValueError, match=r"it has: linear_gelu#0\.\.3, linear_add#0\.\.0"):
        sample().to_mermaid(region)


def test_mermaid_is_cut_at_forty_boxes() -> None:
    code = "def forward(self, x):\n" + "".join(f"    a_{i} = torch.ops.aten.sin.default(x)\n" for i in range(100))
    region = fused(before=tuple(f"a_{i}" for i in range(100)))
    text = Report([graph(before=code, fused=(region,))]).to_mermaid("linear_gelu")
    assert text.count("aten.sin") == page.MERMAID_NODES and "61 more nodes" in text


def test_mermaid_labels_are_escaped() -> None:
    text = hostile('"];\n<img src=x>#quot;').to_mermaid('"];\n<img src=x>#quot;#0')
    title = text.splitlines()[1]
    assert re.fullmatch(r'  subgraph region\["[\w .,:/+#;-]*"\]', title) and "<img" not in text
