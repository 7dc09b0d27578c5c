"""The grader of MATH answers: which box counts, and what equals what."""

# ruff: noqa: RUF001 (letters that look alike are the point)

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from itertools import pairwise

import psutil
import pytest

import mathequal
import mathequal.process
from mathequal import equivalence, extract_boxed, grade_boxed
from tests.conftest import ROOT, call
from tests.spellings import near, spellings

MATH = os.path.join(os.path.dirname(__file__), "../../shared/data/math")


@pytest.fixture(scope="module", autouse=True)
def a_busy_machine_decides_nothing():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mathequal.process, "TIME_LIMIT", 600)
        yield


# ---- MATH: which box -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so $\boxed{12}$.", "12"),
        (r"first \boxed{8}, or rather \boxed{9}", "9"),  # the last one
        (r"\boxed{\frac{\sqrt{2}}{3}}", r"\frac{\sqrt{2}}{3}"),
        (r"\fbox{7}", "7"),
        (r"\boxed {  7  }", "7"),
        (r"$n = \boxed 4$.", "4"),
        (r"$n = \boxed-4$", "-4"),
        (r"$\boxed\pi$", r"\pi"),
        (r"\boxed{6}. Above I used \boxed as asked.", "6"),
        (r"Write \boxed{} around it: \boxed{6}", "6"),
        (r"\boxed{6} as in \boxed{}, \boxed{\,} and \boxed{\text{ }}", "6"),
        (r"\boxed{6} and then \boxed{7", "6"),  # the last complete one
        (r"\boxed{7", None),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"a } and a { before \boxed{3}", "3"),
        (r"x\\\boxed{3}", "3"),
        (r"\\boxed{3}", "3"),
        (r"\boxed{\boxed{}}", None),
        (r"\boxedtimes{3}", None),
        ("boxed{3}", None),
        ("the answer is 3", None),
        ("", None),
    ],
)
def test_extract_boxed(text, content):
    assert extract_boxed(text) == content


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 50_000,
        r"\boxed{" * 50_000 + "1" + "}" * 50_000,
        r"\boxed{}" * 50_000,
        r"\boxed" * 50_000,
        r"\boxed" + " " * 1_000_000,
        r"\boxed" + "(" * 1_000_000,
        r"\boxed{1" + " " * 1_000_000 + "2}",
        "{" * 1_000_000,
        "\\" * 1_000_001,
    ],
)
def test_extraction_is_linear(text):
    start = time.thread_time()
    extract_boxed(text)
    assert time.thread_time() - start < 30


# ---- MATH: what equals what, as `answer | reference` ---------------------------------------------

EQUAL = r"""
\dfrac{5}{8} | \frac{5}{8} ; \frac58 | 0.625 ; 5/8 | \frac{5}{8} ; \frac5{8} | \frac{5}8
-\frac{5}{8} | \frac{-5}{8}
4\frac{1}{3} | \frac{13}{3} ; 4 1/3 | \frac{13}{3} ; -4\frac{1}{3} | -\frac{13}{3}
4\cdot\frac{1}{3} | \frac{4}{3}
0.\overline{27} | \frac{3}{11} ; 2.1\overline{6} | \frac{13}{6} ; 0.(6) | \frac{2}{3}
0.666\ldots | \frac{2}{3}
56,000 | 56000 ; 56{,}000 | 56000 ; 56\,000 | 56000 ; 56,\!000 | 56 000 ; 8,123.50 | 8123.5
0042 | 42 ; 42. | 42
6! | 720 ; \binom{7}{3} | 35 ; {7 \choose 3} | 35 ; 3^5 | 243 ; 2^{3^2} | 512
4.2\times10^{4} | 42000 ; 7e4 | 70000
9 thousand | 9000 ; \$4\text{ million} | 4000000 ; \text{seven} | 7 ; +7 | 7 ; \lceil 6.2 \rceil | 7
|-7| | 7
\sqrt{75} | 5\sqrt3 ; \frac{6}{\sqrt{3}} | 2\sqrt{3} ; \sqrt{7+4\sqrt3} | 2+\sqrt3
\sqrt[3]{-27} | -3 ; 5^{1/3} | \sqrt[3]5
\log_3 81 | 4 ; \log_381 | 4 ; \ln 9 | 2\ln 3 ; \sin 150^\circ | \frac12 ; \cos(\pi/3) | 0.5
\tan^{-1} 1 | \frac{\pi}{4}
\cot^2 t | \csc^2 t - 1 ; \sin 2t | 2\sin t\cos t ; |u| | \sqrt{u^2} ; \frac{u^2-9}{u-3} | u+3
e^{-u} | \frac1{e^u}
7\text{ kg} | 7 ; 7 km | 7 ; 7\text{ m}^2 | 7\text{ square meters} ; 7\text{ hrs} | 7\text{ hours}
7 owls | 7 ; 7 mph | 7\text{ miles per hour} ; 7\text{ km/h} | 7 kilometers per hour
\$7.50 | 7.5 ; 7.5 dollars | \$7.50 ; 7¢ | 7\text{ cents} ; 70\% | 70 ; 70 percent | 70\%
30^{\circ} | 30 ; 30° | 30^\circ
n = 8 | 8 ; 8 | n=8 ; g(t)=3t | 3t ; \text{Volume} = 8 | 8 ; \angle PQR = 40^\circ | 40
n = 3+5 = 8 | 8 ; m_1=8 | 8
y=3x-1 | 3x-y=1 ; 6y=18x-6 | y=3x-1 ; u^2+v^2=5 | 5=v^2+u^2 ; (x,y)=(4,5) | (4,5) ; P=(4,5) | (4,5)
(t+2)(t-2) | t^2-4 ; 2(u+v) | 2v+2u ; -(u-v) | v-u ; uvw | wvu
am+1 | 1+ma ; \frac{in}{2} | \frac12 ni
\frac{u}{2}+\frac13 | \frac{3u+2}{6} ; t(t+1)/2 | \frac{t^2+t}{2}
\left(4, \frac12\right) | (4,0.5) ; [-1,\infty) | [-1, +\infty) ; \langle 4,5 \rangle | (4,5)
(100, 200) | (100,200)
8, 9 | 9,8 ; 8 \text{ and } 9 | 9,8 ; 7, 8, and 9 | 9,8,7 ; 8; 9 | 9,8 ; n=8 \text{ or } n=9 | 8,9
300, 100 | 100, 300
\{8,9\} | \{9,8\} ; \{8,8,9\} | \{8,9\} ; 8,9 | \{9,8\} ; \{\} | \emptyset ; \varnothing | ∅
(1,7),(2,8) | (2,8),(1,7)
\pm 6 | 6,-6 ; t=\pm 6 | -6, 6 ; 3\pm\sqrt2 | 3-\sqrt2,3+\sqrt2
\frac{-1\pm\sqrt{3}}{2} | \frac{-1+\sqrt3}{2}, \frac{-1-\sqrt3}{2}
5-2i | -2i+5 ; \frac{2}{1+i} | 1-i ; i^3 | -i ; \infty | +\infty ; -infinity | -\infty
t \geq 4 | [4,\infty) ; 4 \le t | t\ge4 ; 3t<12 | t<4 ; 1<t\le4 | (1,4] ; t\in(1,4] | 4\ge t>1
t>1 \text{ and } t<4 | (1,4)
t<1 \text{ or } t>4 | (4,\infty)\cup(-\infty,1) ; t\ne1 | (-\infty,1)\cup(1,\infty)
\mathbb{R}\setminus\{1\} | t\ne 1
\{t \mid t>4\} | (4,\infty) ; (0,2]\cup(1,4) | (0,4) ; a \ge b | b \le a
\begin{pmatrix} 5 \\ 6 \end{pmatrix} | \begin{bmatrix}5\\6\end{bmatrix}
2\begin{pmatrix}1&2\\\end{pmatrix} | \begin{pmatrix}2&4\end{pmatrix}
\text{(D)} | D ; (D) | \text{D} ; \textbf{(D) }17 | D ; \text{(D)} 17 | 17 ; B, A | \text{A,B}
\text{Parabola} | parabola ; \text{Yes} | yes ; \mathrm{Wednesday} | \text{wednesday}
\text{Not possible.} | not possible
7:45\text{ a.m.} | 7:45 AM ; 07:45 | 7:45 ; 5:3 | 5 : 3 ; 2201_{3} | 2201_3 ; 2201 | 2201_3
B7_{12} | \text{B7}_{12}
−8 | -8 ; 5×7 | 35 ; ¾ | 0.75 ; 2¾ | 2.75 ; t³ | t^3 ; √5 | \sqrt5 ; ２４ | 24 ; t ≤ 4 | t\le 4
3π | 3\pi ; 10⁻² | 0.01 ; 4\u200b | 4
5pi/6 | \frac{5\pi}{6} ; 2*sqrt(7) | 2\sqrt7 ; t**3 | t^3 ; exp(3t) | e^{3t} ; t^(1/2) | \sqrt t
t>=4 | t \ge 4
\text{The answer is } 6 | 6 ; \approx 6.3 | 6.3 ; \mathbf{6} | 6 ; \displaystyle 6 | 6
\boxed{6} | 6 ; $6$ | 6 ; 6\\ | 6
\frac{|3} | \frac{|3} ; \text{March 3} | march 3
"""
DIFFERENT = r"""
\frac58 | \frac85 ; 0.67 | \frac23 ; 0.6666666666666666 | \frac23 ; 0.\overline{6} | 0.6
4\frac13 | \frac43 ; 4\frac{1}{3} | 4
\frac{1}{40!} | \frac{1}{41!} ; 99999999999999999999 | 99999999999999999998 ; 4.2\times10^4 | 420
10^{400} | \infty
\sqrt{6} | \sqrt{5} ; 2.2360679774997896964 | \sqrt5 ; 3.1416 | \pi ; \sqrt{2}\cdot 3 | \sqrt{6}
\sqrt{2+\sqrt3} | \sqrt2+\sqrt3
7\text{ kg} | 8\text{ kg} ; 7\text{ kg} | 7\text{ km} ; 7\text{ ft} | 7\text{ ft}^2
\$7 | 7\text{ cents} ; 7\% | 0.07 ; 70 | 7000
30^\circ | \frac{\pi}{6} ; \cos 1^\circ | \cos 1 ; n=8 | 9 ; n=8 | m=8 ; n=8=9 | 9 ; y=3x-1 | y=3x+1
u+v=8 | 8
t^2 | T^2 ; (t+1)^2 | t^2+1 ; u-v | v-u ; u^v | v^u ; \frac{3}{2t} | \frac32t ; t | \sqrt{t^2}
\sin^2 t | 1+\cos^2 t
(4,5) | (5,4) ; (4,5) | [4,5] ; (4,5] | [4,5) ; (4,5) | \{4,5\} ; (4,5) | 4,5 ; (4,5,6) | (4,5)
(4,5 | (4,5)
8,9 | 8 ; 8 | 8,9 ; 8,8,9 | 8,9 ; 8,9,10 | 8,9,11 ; \{8\} | \emptyset ; \emptyset | 0
(1,7),(2,8) | (1,8),(2,7)
\pm 6 | 6 ; 6 | \pm6 ; 3+\sqrt2 | 3\pm\sqrt2 ; 5-2i | 5+2i ; -\infty | \infty ; 234, 1 | 1,234
1 2 | 12
t<4 | t>4 ; t<4 | t\le4 ; t<4 | s<4 ; (1,4) | 1\le t<4 ; (0,1)\cup(1,4) | (0,4)
(0,3)\cap(1,4) | (0,3)\cup(1,4)
\begin{pmatrix}5\\6\end{pmatrix} | \begin{pmatrix}5&6\end{pmatrix}
\begin{pmatrix}5\\6\end{pmatrix} | \begin{pmatrix}6\\5\end{pmatrix}
\text{(D)} | \text{(E)} ; \text{week} | \text{month} ; \text{yes} | \text{no}
\text{March 3} | \text{March 4} ; \text{at least }6 | 6
7:45\text{ a.m.} | 7:45\text{ p.m.} ; 8:00 | 7:00 ; 5:3 | 3:5 ; 2201_3 | 2201_4 ; 2201_3 | 2200_3
−8 | 8
\frac{1}{0} | \infty ; \frac00 | 0 ; nan | 0 ; None | 0 ; True | 1 ; 0x7 | 0 ; 7 - | 7 ; 7 @ | 7
2^3^2 | 512
\sum_{k=1}^{3} k | 5 ; \int_0^1 x dx | 1
\begin{cases} 1 \\ 2 \end{cases} | \begin{cases} 2 \\ 1 \end{cases}
"""

# Kinds of spellings that were graded wrong once; they came from `tests/spellings.py` over MATH.
MENDED = {
    "fractions": r"""
{5 \over 8} | \frac58 ; {\sqrt{75} \over 10} | \frac{\sqrt3}{2} ; 4{1 \over 3} | \frac{13}{3}
4{\frac13} | \frac{13}{3} ; x^{1 \over 2} | \sqrt x ; \nicefrac{5}{8} | 0.625 ; \sfrac58 | 0.625
5\u20448 | \frac58
""",
    "thousands": r"""
56\;000 | 56000 ; 56\:000 | 56000 ; 56{,}\!000 | 56000 ; 56{\,}000 | 56000 ; 56'000 | 56000
56\thinspace 000 | 56000 ; \frac{1}{56,000} | \frac{1}{56000}
Q=(100,101) | (100,101) ; t=[-36,104] | [-36,104]
""",
    "powers of ten": r"7.0e-05 | 0.00007 ; 7.2e+04 | 72000",
    "roots": r"3√5/2 | \frac{3\sqrt5}{2} ; \sqrt 5/2 | \frac{\sqrt5}{2}",
    "superscripts": r"2¹⁰⁰ | 2^{100} ; 2201₁₂ | 2201_{12}",
    "degrees": r"""
\boxed{30^\circ} | 30^\circ ; \cos{150^\circ} | \cos 150^\circ ; 30^o | 30
30^{\text{o}} | 30 ; 30º | 30 ; 30˚ | 30 ; 30{}^\circ | 30 ; 30^\degree | 30 ; 30\textdegree | 30
\measuredangle PQR = 40^\circ | 40
""",
    "money": r"""
US\$7.50 | 7.5 ; \text{US}\$7.50 | 7.5 ; \text{USD }7 | 7 ; \textdollar 7 | \$7 ; \mathdollar 7 | 7
""",
    "what stands around": r"""
\boldsymbol{\frac12} | 0.5 ; \bm{6} | 6 ; \mathbf{\frac{1}{2}} | 0.5 ; \color{blue}{6} | 6
\large 6 | 6 ; \underline{6} | 6 ; 6\hspace{1mm}\text{cm} | 6
{8 \text{ or } 9} | 8,9 ; {\{1,2\pm\sqrt5\}} | \{1,2\pm\sqrt5\}
= 6 | 6 ; \Rightarrow 6 | 6 ; \therefore t=6 | 6 ; \text{The least value is } 6 | 6
\text{The solutions are }8, 9 | 8,9 ; \text{Range: }[4,5) | [4,5)
\textsf{even} | \text{even} ; \emph{even} | \text{even}
""",
    "labels": r"""
f^{-1}(t)=3t | 3t ; f(-1)=8 | 8 ; f(g(2))=8 | 8 ; |AB|=8 | 8 ; [PQR]=8 | 8
a_{n+1}=8 | 8 ; \vec{u}=(4,5) | (4,5)
\|\mathbf{u}\|=8 | 8 ; (r,\theta)=(4,\pi) | (4,\pi) ; \overrightarrow{PQ}=(4,5) | (4,5) ; t &= 8 | 8
\mathbf{P}^{-1}=\begin{pmatrix}5\\6\end{pmatrix} | \begin{pmatrix}5\\6\end{pmatrix}
\begin{pmatrix}u\\v\end{pmatrix}=\begin{pmatrix}5\\6\end{pmatrix} | \begin{pmatrix}5\\6\end{pmatrix}
""",
    "two spellings": r"""
t=1+\sqrt2\approx 2.41 | 1+\sqrt2 ; 63\% | 0.63=63\% ; 0.63 | 0.63=63\%
""",
    "sets": r"""
+/-6 | \pm 6 ; 3 +/- \sqrt2 | 3\pm\sqrt2 ; t=8 \lor t=9 | 8,9 ; t<1 \vee t>4 | t<1 \text{ or } t>4
t>1 \land t<4 | (1,4) ; (0,1) U (2,4) | (0,1)\cup(2,4) ; (0,1)\bigcup(2,4) | (0,1)\cup(2,4)
\{t\in\mathbb{R} \mid t>4\} | (4,\infty) ; \left\{t \;\middle|\; t>4\right\} | t>4
t>4, t\in\mathbb{R} | (4,\infty) ; t\in\mathbb R, t\ne 1 | t\ne 1 ; t\not=1 | t\ne1
\mathbb{R}\backslash\{1\} | t\ne1 ; \mathbb{R}-\{1\} | t\ne1
""",
    "matrices": r"""
\begin{pmatrix}5\\[1ex]6\end{pmatrix} | \begin{pmatrix}5\\6\end{pmatrix}
\begin{pmatrix*}[r]5\\6\end{pmatrix*} | \begin{pmatrix}5\\6\end{pmatrix}
2\cdot\begin{pmatrix}1&2\end{pmatrix} | \begin{pmatrix}2&4\end{pmatrix}
2\left(\begin{array}{cc}1&2\end{array}\right) | \begin{pmatrix}2&4\end{pmatrix}
""",
    "choices": r"""
\text{Option D} | D ; Choice D | \text{(D)} ; \text{Graph D} | D ; \text{D.} | (\text{D})
\mathsf{D} | D ; \text{The answer is D} | (\text{D})
""",
    "ratios and times": r"""
5\text{ to }3 | 5:3 ; 5 to 3 | 5:3 ; 5∶3 | 5:3 ; 5{:}3 | 5:3 ; 7:00 am | 7\text{ a.m.}
""",
    "bases": r"""
2201_{(3)} | 2201_3 ; (2201)_3 | 2201_3 ; {2201}_{3} | 2201_3 ; 2201\text{ base }3 | 2201_3
2201 (base 3) | 2201_3 ; 2201_{\text{base }3} | 2201_3 ; 101_{two} | 101_2
""",
}
MENDED_DIFFERENT = r"""
2 = 3 | 0.63=63\% ; f(3)<f(1)<f(4) | f(2)<f(1)<f(4) ; 10\$ | 10\%
"""


def pairs(text: str) -> list[list[str]]:
    text = text.strip().replace(r"\u200b", "\u200b").replace(r"\u2044", "\u2044")
    text = text.replace("\n", " ; ")
    return [pair.split(" | ") for pair in text.split(" ; ")]


@pytest.mark.parametrize(("answer", "reference"), pairs(EQUAL))
def test_equal(answer, reference):
    assert equivalence.equal(answer, reference) and equivalence.equal(reference, answer)


@pytest.mark.parametrize(
    ("kind", "answer", "reference"),
    [(kind, *pair) for kind, table in MENDED.items() for pair in pairs(table)],
)
def test_mended_kinds(kind, answer, reference):
    assert equivalence.equal(answer, reference) and equivalence.equal(reference, answer)


@pytest.mark.parametrize(("answer", "reference"), pairs(DIFFERENT) + pairs(MENDED_DIFFERENT))
def test_different(answer, reference):
    assert not equivalence.equal(answer, reference)


def test_grade_boxed():
    assert grade_boxed(r"so \boxed{\frac{1}{2}}", "0.5") == 1.0
    assert grade_boxed(r"so \boxed{0.49}", "0.5") == 0.0
    assert grade_boxed("so 0.5", "0.5") == 0.0
    assert grade_boxed(r"\boxed{}", "") == grade_boxed(r"\boxed{1}", " ") == 0.0
    long = r"\begin{pmatrix}" + r"12345 & 67890 \\ " * 200 + r"\end{pmatrix}"
    assert grade_boxed(rf"\boxed{{{long}}}", long.replace(" ", "  ")) == 1.0
    assert grade_boxed(rf"\boxed{{{long}}}", "12345") == 0.0


# ---- hostile answers -----------------------------------------------------------------------------

HOSTILE = [
    "__import__('os').system('touch GRADER_PWNED')",
    "(lambda: open('GRADER_PWNED', 'w'))()",
    "[].__class__.__base__.__subclasses__()",
    "{0.__class__}",
    "exit()",
    "8^{8^{8^{8}}}",
    "8**8**8**8",
    "(8^{9000})^{1400}",
    r"\exp(\exp(9^{900}))",
    "((8^{999})^{999})^{999}",
    "2^{2^{2^{2^{2^{x}}}}}",
    "e^{e^{e^{e^{e^9}}}}",
    "88888888!",
    "8!!!!!!!!",
    r"\binom{900000000}{450000000}",
    r"\sum_{n=1}^{900000000} n^n",
    "(x+y+z+w)^{99999}",
    "(x+1)^{1400}-(1+x)^{1399}(x+1)+1",
    "1e99999999",
    "7\0",
    "9" * 999,
    "9" * 1_000_000,
    "1" + "+1" * 490,
    "-" * 900 + "1",
    "(" * 450 + "1" + ")" * 450,
    "{" * 450 + "1" + "}" * 450,
    r"\frac{1}{1+" * 80 + "1" + "}" * 80,
    r"\sqrt{" * 140 + "2" + "}" * 140,
    r"\sin " * 199 + "x",
    r"\pm 1" * 190,
    ",".join(f"x^{{{n}}}+1" for n in range(99)),
    "|" * 900 + "x",
    '"' * 900,
    " " * 900 + "x 1" + " " * 90 + "/",
    "1." * 400,
    "0." + "1" * 900 + r"\ldots",
    r"\text{" * 150 + "a" + "}" * 150,
    "\ufdfa" * 900,
]


def cpu_seconds_of_the_worker() -> float:
    """Its own, which a busy machine does not change; 0 where it has not started."""
    process = mathequal.worker.process
    return sum(psutil.Process(process.pid).cpu_times()[:2]) if process else 0.0


def test_hostile_answers_are_wrong_soon_and_small():
    assert grade_boxed(r"\boxed{1/2}", "0.5") == 1  # its imports are no work
    before = dict(mathequal.worker.failures)
    for answer in HOSTILE:
        for reference in ("3", r"\frac{1}{2}", "x", "(1,2)"):
            spent = cpu_seconds_of_the_worker()
            assert grade_boxed(rf"\boxed{{{answer}}}", reference) == 0.0, answer[:50]
            assert cpu_seconds_of_the_worker() - spent < 10, answer[:50]
    grade_boxed(r"\boxed{4/2}", "2")
    with open(f"/proc/{mathequal.worker.process.pid}/status") as file:
        peak = int(re.search(r"VmHWM:\s*(\d+) kB", file.read())[1])
    limit, _ = resource.prlimit(mathequal.worker.process.pid, resource.RLIMIT_AS)
    assert peak < 500_000 and limit <= 1 << 30
    assert not os.path.exists("GRADER_PWNED") and not os.path.exists(f"{ROOT}/GRADER_PWNED")
    assert mathequal.worker.failures == before  # bounds, not the limit of time


def test_nothing_evaluates_text():
    paths = [f"mathequal/{name}" for name in os.listdir(f"{ROOT}/mathequal") if ".py" in name]
    for path in (*(path for path in paths if path.endswith(".py")), "common/grading.py"):
        with open(f"{ROOT}/{path}") as file:
            assert not re.search(r"\b(eval|exec|sympify|parse_expr|nsimplify|S)\(", file.read())


def test_a_worker_that_dies_or_hangs_is_replaced_counted_and_said(monkeypatch, capfd):
    worker = mathequal.process.Worker()
    assert worker.equal("1/2", "0.5")
    os.kill(worker.process.pid, signal.SIGKILL)
    assert not worker.equal("1/2", "0.5")
    assert worker.equal("1/2", "0.5")
    monkeypatch.setattr(mathequal.process, "TIME_LIMIT", 0.5)
    os.kill(worker.process.pid, signal.SIGSTOP)
    assert not worker.equal("1/3", "0.5")
    monkeypatch.undo()
    assert worker.equal("1/2", "0.5")
    assert worker.failures == {"timeout": 1, "crash": 1, "repeat": 0}
    assert worker.take_failures() == 2 and worker.take_failures() == 0
    warnings = capfd.readouterr().err
    assert "warning: crash grading" in warnings and "warning: timeout grading '1/3'" in warnings
    worker.stop()


def test_a_failure_counts_as_often_as_it_makes_an_answer_wrong(monkeypatch):
    """And is forgotten then: a machine that was busy for a moment decides nothing for good."""
    monkeypatch.setattr(mathequal.worker, "cache", {})
    mathequal.worker.take_failures()
    pairs = [(r"\boxed{1/2}", "0.5")] * 3
    with monkeypatch.context() as patch:
        assert grade_boxed(r"\boxed{1/4}", "0.25") == 1  # so there is a worker to be stopped
        os.kill(mathequal.worker.process.pid, signal.SIGSTOP)
        patch.setattr(mathequal.process, "TIME_LIMIT", 0.5)
        assert [grade_boxed(*pair) for pair in pairs] == [0, 0, 0]
    assert mathequal.worker.failures == {"timeout": 1, "crash": 0, "repeat": 2}
    assert mathequal.worker.take_failures() == 3
    assert [grade_boxed(*pair) for pair in pairs] == [1, 1, 1]
    assert mathequal.worker.take_failures() == 0


def test_the_worker_ends_with_its_parent():
    code = "import mathequal; mathequal.worker.equal('1', '2'); import os, signal\n"
    code += "print(mathequal.worker.process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    deadline = time.monotonic() + 600
    while os.path.exists(f"/proc/{int(result.stdout)}") and time.monotonic() < deadline:
        with open(f"/proc/{int(result.stdout)}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "Z":  # nobody reaps it in a container
                return
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{int(result.stdout)}")


def test_a_forked_process_asks_its_own_worker():
    assert mathequal.worker.equal("1/2", "0.5")
    child = os.fork()
    if child == 0:
        right = mathequal.worker.process is None and mathequal.worker.equal("1/4", "0.25")
        mathequal.worker.stop()
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert mathequal.worker.equal("1/8", "0.125")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists(MATH), reason="no MATH data beside the clone")
def test_math_solutions_against_their_own_answer_and_others():
    solutions = []
    for name in ("train", "test"):
        with open(f"{MATH}/{name}.jsonl", encoding="utf-8") as file:
            solutions += [json.loads(line)["solution"] for line in file]
    answers = [extract_boxed(solution) for solution in solutions]
    usable = [i for i, answer in enumerate(answers) if answer]
    assert len(solutions) - len(usable) == 2  # empty boxes
    assert all(grade_boxed(solutions[i], answers[i]) == 1.0 for i in usable)
    assert all(equivalence.same(v, v) for a in set(answers) - {None} if (v := read(a)))
    others = [(answers[i], answers[j]) for i, j in pairwise(usable)]
    equal = {pair for pair in others if equivalence.equal(*pair)}
    assert all(bare(a) == bare(b) for a, b in equal), [p for p in equal if bare(p[0]) != bare(p[1])]


@pytest.mark.parametrize("sample", [150, pytest.param(None, marks=pytest.mark.soak)])
@pytest.mark.skipif(not os.path.exists(MATH), reason="no MATH data beside the clone")
def test_math_answers_in_other_spellings(sample):
    answers = set()
    for name in ("train", "test"):
        with open(f"{MATH}/{name}.jsonl", encoding="utf-8") as file:
            answers |= {extract_boxed(json.loads(line)["solution"]) for line in file}
    answers = sorted(answers - {None})
    wrong = []
    for answer in random.Random(0).sample(answers, sample or len(answers)):
        for found, expected in (spellings(answer), True), (near(answer), False):
            for kind, text in found:
                if equivalence.equal(text, answer) != expected:
                    wrong.append((kind, text, answer))
    assert not wrong, (len(wrong), wrong[:9])


def read(answer: str):
    return equivalence.read(equivalence.clean(answer), True)


def bare(answer: str) -> str:
    """The digits of an answer without what may be left out: units, labels, spellings."""
    answer = re.sub(
        r"\\(text|mbox)\{[^{}]*\}|^\w ?=|_\d|\^\{?\\circ\}?|\\[dt]?frac|\\.", "", answer
    )
    return re.sub(r"[\s{}$%]", "", answer)


def test_the_command_of_the_package(tmp_path):
    row = {"id": "a", "dataset": "math", "response": r"\boxed{1/2}", "ground_truth": "0.5"}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    assert call("-m", "mathequal", str(path)).stdout.startswith("accuracy 1.000 (1/1)\n")
    path.write_text(json.dumps({**row, "dataset": "gsm8k"}))
    assert "rows.jsonl:1: not a row" in call("-m", "mathequal", str(path), fails=True).stderr
    assert "usage: python -m mathequal FILE.jsonl" in call("-m", "mathequal", fails=True).stderr


def test_the_package_needs_nothing_of_the_project():
    """And a process that only extracts boxes does not wait for sympy."""
    code = "import sys, mathequal; mathequal.extract_boxed('x'); print([n for n in ('common', "
    code += "'sympy', 'torch') if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr
