"""The text of the ARC prompts, as templates of `prompts`. Any edit changes every activation: add a
version instead."""

from __future__ import annotations

_TASK = "Here is a puzzle from the Abstraction and Reasoning Corpus (ARC).\n"
_EXAMPLES = "The pairs of grids below show what becomes of an input grid.\n"
_HINTS = (
    "What happens to a grid can rest on objects and how they meet, on a goal that is pursued, "
    "on counting and comparing, or on simple shapes and where they lie.\n"
)

SHORT_SYSTEM = "You answer questions about grids."

LONG_SYSTEM = """You solve puzzles from the Abstraction and Reasoning Corpus (ARC).
You are shown pairs of grids, each an input and what it became. Find out what was done to the inputs
and do the same to the last grid, which comes without an output.
A grid has from 1 to 30 rows and columns; each cell holds one of ten colours, written 0 to 9, and 0
is most often the background.
What was done rests on things that a child knows:

- objects: cells that belong together move, grow and meet as one, and do not vanish without cause;
- goals: some objects seem to want something, and act on it;
- numbers: objects can be counted, ordered, added and compared;
- space: shapes can be turned, mirrored, moved, scaled, joined, repeated, or be near and far.
"""

SOLVE_SHORT = _TASK + _EXAMPLES

SOLVE = (
    _TASK
    + _EXAMPLES
    + "Find out what is done to the inputs, and do it to the test grid.\n"
    + _HINTS
)

NEW_GRID = (
    "The grids below come from the Abstraction and Reasoning Corpus (ARC).\n"
    "Draw another grid of the same kind that is not among them.\n"
)

WRITE_CODE = (
    _TASK
    + _EXAMPLES
    + "Write a Python function `task(grid)` that takes a numpy array and returns what it becomes.\n"
    + _HINTS
)

GENERATE_CODE = """Below are pairs of grids from the Abstraction and Reasoning Corpus (ARC).
Write a Python function `task(grid)` that takes a two-dimensional numpy array and returns the output
that belongs to it. It must be right for every pair, and for inputs of the same kind.

## What to look for

- **Objects**: groups of cells that belong together.
- **Goals**: an order or a symmetry that the output reaches.
- **Numbers**: how many there are, how large, and in which order.
- **Space**: what touches, holds or mirrors what.

## Examples
"""

CODE_ANSWER = """## Code

The function that turns inputs into outputs:

```python
"""

APPLY_CODE = """Run the Python code below on the grid that follows, and write down what it returns.

## Code

```python
"""

SELECT = (
    _TASK
    + _EXAMPLES
    + "Find out what is done to the inputs, and choose the output of the test grid.\n"
    + "Answer with the number of your choice alone.\n"
    + _HINTS
)

VERIFY = (
    _TASK
    + _EXAMPLES
    + "Find out what is done to the inputs, and say whether the output of the test grid is right.\n"
    + 'Answer "yes" or "no" alone.\n'
    + _HINTS
)

GRID_ANSWER = "### Output\n\n```grid"
_PYTHON = "```python\n"
_PAIRS = """{% for pair in train_samples %}
## Example {{ loop.index }}

### Input

{{ pair.input }}

### Output

{{ pair.output }}
{% endfor %}"""
_GRIDS = """{% for pair in train_samples %}
## Grid example {{ loop.index }}

{{ pair.input }}
{% endfor %}"""
_TEST = """
## Test case

### Input

{{ test_input }}"""
_OPTIONS = """
{% for choice in test_output_choices %}
### Output option {{ loop.index }}

{{ choice }}
{% endfor %}"""
_OUTPUT = """

### Output

{{ test_output }}

Is the test output correct?"""
_RUN = """{{ code }}
```

## Example

### Input

{{ test_input }}"""


def _deeper(text: str) -> str:
    """With headings of the next level."""
    return text.replace("## ", "### ")


# Parts of each version that differ from the defaults of `prompts.PromptTemplate`.
VERSIONS = {
    "output-from-examples-v0": {"system": LONG_SYSTEM, "user": SOLVE_SHORT + _PAIRS + _TEST},
    "output-from-examples-v1": {"user": SOLVE + _PAIRS + _TEST},
    "input-from-inputs-v0": {"user": NEW_GRID + _GRIDS, "answer": "## New grid\n\n```grid"},
    "output-from-outputs-v0": {
        "user": NEW_GRID + _GRIDS.replace("pair.input", "pair.output"),
        "answer": "## New grid\n\n```grid",
    },
    "code-from-examples-v0": {"user": WRITE_CODE + _PAIRS, "answer": _PYTHON},
    "code-from-examples-v1": {
        "user": GENERATE_CODE
        + _deeper(_PAIRS)
        + "\n## Code\n\nImplement the transformation in Python.",
        "answer": _PYTHON,
    },
    "code-from-examples-v2": {"user": GENERATE_CODE + _deeper(_PAIRS), "answer": CODE_ANSWER},
    "code-from-examples-v3": {
        "user": GENERATE_CODE.replace("task(grid)", "task(img)") + _deeper(_PAIRS + _TEST),
        "answer": CODE_ANSWER,
    },
    "output-from-code-v0": {"user": APPLY_CODE + _RUN},
    "select-output-from-examples-v0": {"user": SELECT + _PAIRS + _TEST + _OPTIONS, "answer": ""},
    "verify-output-from-examples-v0": {"user": VERIFY + _PAIRS + _TEST + _OUTPUT, "answer": ""},
}
