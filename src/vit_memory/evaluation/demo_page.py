"""The demonstration as one HTML page that needs nothing else: pictures, what every task says of them, the numbers."""

import base64
import html
import io

import numpy as np
from PIL import Image

from vit_memory.evaluation.demo import Demonstration, Learned
from vit_memory.evaluation.metrics import AnyScores, MultiLabelScores, RegressionScores
from vit_memory.predictions import LabelsPrediction, Prediction, ValuesPrediction

_SHOWN = 24
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5d6675; --paper: #fbfaf7; --card: #ffffff;
  --line: #e4e1d8; --good: #1d7a46; --bad: #b3311f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e6df; --soft: #a0a7b3; --paper: #16191f; --card: #1f242c;
  --line: #343b46; --good: #6fcf97; --bad: #ff8a75; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { max-width: 44rem; } .soft { color: var(--soft); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .8rem; margin: 1.4rem 0; }
.fact { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem; }
.fact b { display: block; font-size: 1.5rem; line-height: 1.3; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; min-width: 34rem; }
th, td { text-align: left; padding: .45rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; }
td:nth-child(2) { min-width: 13rem; } td:nth-child(3) { white-space: nowrap; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.6rem, 1fr)); gap: .8rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: .6rem; overflow: hidden; }
figure img { width: 100%; display: block; aspect-ratio: 1; }
figcaption { padding: .45rem .6rem .55rem; font-size: .86rem; line-height: 1.45; }
.yes { color: var(--good); } .no { color: var(--bad); }
code { background: var(--card); border: 1px solid var(--line); border-radius: .3rem; padding: .05rem .3rem; }
"""


def render(shown: Demonstration) -> str:
    """The page."""
    rows = "".join(_row(shown, known) for known in shown.learned)
    pictures = "".join(_picture(shown, i) for i in range(min(_SHOWN, len(shown.scenes.digit))))
    files = sum(known.file_bytes for known in shown.learned)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>vit-memory: three tasks on one frozen backbone</title><style>{_STYLE}</style>
<main>
<h1>One frozen backbone, three tasks, one pass</h1>
<p>A small vision transformer learned three questions about the same pictures. Its own weights were not touched: every
task is a class token, five memory cells in each block and a head, in a file of its own. All three answer in one pass,
and what the backbone said before, it still says, to the bit.</p>
<div class="facts">
<div class="fact"><b>{"yes" if shown.identical else "NO"}</b>original output bit-identical with all tasks attached</div>
<div class="fact"><b>{shown.cost:.2f} ×</b>the plain backbone's pass, for three tasks at once</div>
<div class="fact"><b>{files / 1000:.0f} kB</b>for three tasks; the backbone is {shown.backbone_bytes / 1e6:.0f} MB</div>
</div>
<h2>What was learned</h2>
<div class="wide"><table>
<tr><th>task</th><th>question</th><th>kind</th><th class="n">score</th><th class="n">head only</th>
<th class="n">file</th><th class="n">trained in</th></tr>
{rows}</table></div>
<p class="soft">On {len(shown.scenes.digit)} test pictures: accuracy of the digit, mean average precision (mAP) of the
traits, share of the variance explained (R²) of the ink. “Head only” is a linear head on the untouched output, trained
beside the task on the same pictures: what one has without tokens. The pictures and the recipe were adjusted while
looking at such numbers: an illustration, not a benchmark.</p>
<h2>Some of the test pictures</h2>
<div class="pictures">{pictures}</div>
<h2>Where the pictures come from</h2>
<p>The digits are real handwriting and the two photographs are real; both come with scikit-learn, so nothing was
downloaded. That a digit lies on a photograph is our doing, to have three questions about one picture. Test pictures
share no digit and no part of a photograph with those that were learned from. The backbone never saw any of them.</p>
<p>Yours: <code>vit-memory train photos/ --name birds</code>, where <code>photos/</code> holds one folder of images per
class.</p>
</main></html>
"""


def score_text(scores: AnyScores) -> str:
    """The figure that a task of this kind is judged by."""
    if isinstance(scores, RegressionScores):
        return f"R² {scores.r2:.3f}"
    if isinstance(scores, MultiLabelScores):
        return f"mAP {scores.mean_average_precision:.3f}"
    return f"{100 * scores.accuracy:.1f} %"


def _row(shown: Demonstration, known: Learned) -> str:
    question = known.question
    builds = f" Builds on <b>{question.extends}</b>." if question.extends else ""
    return (
        f"<tr><td><b>{question.name}</b></td><td>{html.escape(question.asks)}{builds}</td><td>{question.kind}</td>"
        f'<td class="n">{score_text(shown.scores[question.name])}</td>'
        f'<td class="n">{score_text(shown.head_scores[question.name])}</td>'
        f'<td class="n">{known.file_bytes / 1000:.0f} kB</td><td class="n">{known.seconds:.0f} s</td></tr>\n'
    )


def _picture(shown: Demonstration, i: int) -> str:
    lines = [_line(known, shown.predictions[known.question.name][i], shown, i) for known in shown.learned]
    picture, answers = _data_uri(shown.scenes.pixels[i]), "<br>".join(lines)
    return f'<figure><img src="{picture}" alt="picture {i + 1}"><figcaption>{answers}</figcaption></figure>\n'


def _line(known: Learned, prediction: Prediction, shown: Demonstration, i: int) -> str:
    """What one task says of one picture, beside the truth."""
    question = known.question
    target = question.targets(shown.scenes)[i]
    if isinstance(prediction, ValuesPrediction):
        values = ", ".join(f"{value:.1f}" for value in prediction.values.values())
        known_values = ", ".join(f"{value:.1f}" for value in target)
        return f'{question.name}: <b>{values}</b> <span class="soft">is {known_values}</span>'
    if isinstance(prediction, LabelsPrediction):
        answer, truth = list(prediction.present), [question.labels[j] for j in np.flatnonzero(target)]
    else:
        answer, truth = [prediction.label], [question.labels[int(target)]]
    right = set(answer) == set(truth)
    mark = '<span class="yes">✓</span>' if right else '<span class="no">✗</span>'
    correction = "" if right else f' <span class="soft">is {html.escape(", ".join(truth) or "none")}</span>'
    return f"{mark} {question.name}: <b>{html.escape(', '.join(answer) or 'none')}</b>{correction}"


def _data_uri(pixels: np.ndarray) -> str:
    written = io.BytesIO()
    Image.fromarray(pixels).resize((192, 192), Image.Resampling.BICUBIC).save(written, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode()
