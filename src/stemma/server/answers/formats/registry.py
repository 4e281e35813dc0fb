"""All formats by name, a line each. Of several that fit what a template writes, the first counts."""

from collections.abc import Mapping

from stemma.server.answers.formats.cohere import COHERE
from stemma.server.answers.formats.dsml import DEEPSEEK_V4, DEEPSEEK_V32
from stemma.server.answers.formats.format import ToolFormat
from stemma.server.answers.formats.gemma import GEMMA4
from stemma.server.answers.formats.glm import GLM, GLM47
from stemma.server.answers.formats.harmony import HARMONY
from stemma.server.answers.formats.headed import DEEPSEEK_V3, DEEPSEEK_V31, KIMI, MISTRAL, MISTRAL_ARGS
from stemma.server.answers.formats.hermes import HERMES
from stemma.server.answers.formats.internlm import INTERNLM
from stemma.server.answers.formats.json_lists import GRANITE, JAMBA, NEMOTRON, PHI4
from stemma.server.answers.formats.minimax import MINIMAX
from stemma.server.answers.formats.pythonic import LFM2, LLAMA3_JSON, OLMO3, PYTHONIC
from stemma.server.answers.formats.qwen import MIMO, QWEN, SEED

_ALL = (
    HERMES,
    QWEN,
    MIMO,
    SEED,
    GLM,
    GLM47,
    MINIMAX,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    KIMI,
    MISTRAL,
    MISTRAL_ARGS,
    HARMONY,
    GEMMA4,
    GRANITE,
    PHI4,
    NEMOTRON,
    JAMBA,
    INTERNLM,
    COHERE,
    OLMO3,
    LFM2,
    PYTHONIC,
    LLAMA3_JSON,
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {form.name: form for form in _ALL}
