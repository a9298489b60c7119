"""The demo's results as one HTML file without external resources: images, predictions, scores."""

import base64
import html
import io

import numpy as np
from PIL import Image

from vit_memory.demo.run import DemoResult, TrainedTask
from vit_memory.predictions import LabelPrediction, LabelsPrediction, Prediction, ValuesPrediction

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
td:nth-child(4) { min-width: 13rem; } td:nth-child(5) { white-space: nowrap; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .8rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: .6rem; overflow: hidden; }
figure img { width: 100%; display: block; aspect-ratio: 1; }
figcaption { padding: .45rem .6rem .55rem; font-size: .86rem; line-height: 1.45; }
.yes { color: var(--good); } .no { color: var(--bad); }
code { background: var(--card); border: 1px solid var(--line); border-radius: .3rem; padding: .05rem .3rem; }
"""


def render(result: DemoResult) -> str:
    """The page."""
    rows = "".join(_row(result, trained) for trained in result.trained)
    figures = "".join(_figure(result, i) for i in range(min(_SHOWN, len(result.images.digit))))
    files_kb, backbone_mb = sum(trained.file_bytes for trained in result.trained) / 1e3, result.backbone_bytes / 1e6
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>vit-memory: three tasks on one frozen backbone</title><style>{_STYLE}</style>
<main>
<h1>One frozen backbone, three tasks, one pass</h1>
<p>Three tasks were trained on the same images for one small vision transformer. Its weights did not change: each task
is a class token, five memory cells per block and a head, stored in a file of its own. One forward pass computes the
predictions of all three tasks, and the backbone's own output stays bit-identical.</p>
<div class="facts">
<div class="fact"><b>{"yes" if result.identical else "NO"}</b>original output bit-identical with all tasks
attached</div>
<div class="fact"><b>{result.relative_time:.2f} ×</b>the time of the plain backbone, for all three tasks</div>
<div class="fact"><b>{files_kb:.0f} kB</b>for three task files; the backbone has {backbone_mb:.0f} MB</div>
</div>
<h2>Test scores</h2>
<div class="wide"><table>
<tr><th>task</th><th class="n">score</th><th class="n">linear head</th><th>question</th><th>kind</th>
<th class="n">file</th><th class="n">training</th></tr>
{rows}</table></div>
<p class="soft">On {len(result.images.digit)} test images: accuracy for digit, mean average precision (mAP) for traits,
coefficient of determination (R²) for ink. “Linear head” is the baseline: a linear head on the backbone's own output,
trained on the same images. The images and the training recipe were tuned while watching these scores, so this is an
illustration and not a benchmark.</p>
<h2>Predictions on {min(_SHOWN, len(result.images.digit))} test images</h2>
<p class="soft">✓ and ✗ mark right and wrong predictions; the true answer follows in grey.</p>
<div class="figures">{figures}</div>
<h2>About the images</h2>
<p>The handwritten digits and the two photographs are real and come with scikit-learn; nothing was downloaded. The demo
pastes a digit on a part of a photograph, so that one image has something to predict for three tasks. Test images share
no digit and no part of a photograph with the training images. The backbone was not trained on any of them.</p>
<p>To train on your own images: <code>vit-memory train photos/ --name birds</code>, where <code>photos/</code> has one
folder of images per class.</p>
</main></html>
"""


def _row(result: DemoResult, trained: TrainedTask) -> str:
    task = trained.demo_task
    extends = f" Extends <b>{task.extends}</b>." if task.extends else ""
    return (
        f'<tr><td><b>{task.name}</b></td><td class="n">{result.scores[task.name].headline}</td>'
        f'<td class="n">{result.linear_head_scores[task.name].headline}</td>'
        f"<td>{html.escape(task.question)}{extends}</td><td>{task.kind}</td>"
        f'<td class="n">{trained.file_bytes / 1000:.0f} kB</td><td class="n">{trained.seconds:.0f} s</td></tr>\n'
    )


def _figure(result: DemoResult, i: int) -> str:
    lines = [_line(trained, result.predictions[trained.demo_task.name][i], result, i) for trained in result.trained]
    source, caption = _data_uri(result.images.pixels[i]), "<br>".join(lines)
    return f'<figure><img src="{source}" alt="test image {i + 1}"><figcaption>{caption}</figcaption></figure>\n'


def _line(trained: TrainedTask, prediction: Prediction, result: DemoResult, i: int) -> str:
    """One task's prediction for one image, and the truth."""
    task = trained.demo_task
    target = task.targets(result.images)[i]
    if isinstance(prediction, ValuesPrediction):
        values = ", ".join(f"{value:.1f}" for value in prediction.values.values())
        true_values = ", ".join(f"{value:.1f}" for value in target)
        return f'{task.name}: <b>{values}</b> % <span class="soft">({true_values})</span>'
    if isinstance(prediction, LabelsPrediction):
        labels, truth = list(prediction.present), [task.labels[j] for j in np.flatnonzero(target)]
    else:
        label = prediction.label if isinstance(prediction, LabelPrediction) else prediction.text()
        labels, truth = [label], [task.labels[int(target)]]
    correct = set(labels) == set(truth)
    mark = '<span class="yes">✓</span>' if correct else '<span class="no">✗</span>'
    correction = "" if correct else f' <span class="soft">({html.escape(", ".join(truth) or "none")})</span>'
    return f"{task.name}: <b>{html.escape(', '.join(labels) or 'none')}</b> {mark}{correction}"


def _data_uri(pixels: np.ndarray) -> str:
    content = io.BytesIO()
    Image.fromarray(pixels).resize((192, 192), Image.Resampling.BICUBIC).save(content, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode()
