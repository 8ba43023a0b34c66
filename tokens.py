"""What the policy reads and writes: reward tokens, messages to ids, ids to calls.

Implements the prompt side of RC-GRPO (paper, method 1 and 2): a rollout's reward token, <|high_reward|> or
<|low_reward|>, stands as `[Reward Goal: ...]` at the end of the FIRST user message. All before it is the same for every
rollout of a task, so that a sampler can compute it once. Three rules, each with a test in test_all.py:

  1. Ids are the truth. Rendering only appends: `prompt` gives the opening, `answer` what the environment says between
     two assistant messages. What the model sampled is kept as the ids that it sampled and never encoded again.
  2. Only the renderer writes control tokens. `<|im_end|>` in a user's text or a tool's result is spelled out as text: a
     mark is put behind the first character of every such string before the chat template runs, and the rendered text is
     cut at the control tokens and at the marks before it is encoded.
  3. Model output is data. `parse_calls` reads JSON and Python literals with parsers; nothing is ever evaluated.

The model's own chat template writes tools and results where it can (Qwen2.5, Qwen3, Llama-3.1 styles); elsewhere, or
when schemas="compact" asks for short prompts, the tools stand in a system message of ours, or in the first user turn of
a template without a system role (Gemma). A tokenizer or a template that we cannot write is refused at the start.
"""
import ast
import functools
import json
import re
import warnings
from contextlib import suppress
from itertools import groupby
from keyword import iskeyword

from envs import Call, CallError

HIGH, LOW = "<|high_reward|>", "<|low_reward|>"
# The one list of reward tokens. A third goes here; sft.labelled says which reward earns it,
# rcgrpo.draw_tokens draws it, run.COLOURS and the words of grpo.figure show it.
REWARD_TOKENS = {"high": HIGH, "low": LOW}

MARK = "\ue000"                    # private-use character: cuts control-token text that came from outside
SLOT = "\ue001"                    # stands for the assistant's text while the template runs
PINNED_DATE = "26 Jul 2024"        # Llama-3 templates print today's date otherwise: prompts would change overnight
FULL_BLOCK = """You can call functions. Their signatures, one JSON schema a line, stand within <tools></tools>:
<tools>
{tools}
</tools>
To call a function, answer with a JSON object within <tool_call></tool_call>, one such block for each call:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>
When nothing is left to call in this turn, answer in words."""
COMPACT_BLOCK = "Functions:\n{tools}"
HANDED_OVER = "\n\nFunctions now available:\n"
FRAME = "system\nuser\nassistant\ntool\n" + COMPACT_BLOCK + HANDED_OVER        # all that stands around content then

MAX_MESSAGE = 50_000               # characters: json counts the lines before each of its errors, which is quadratic
MAX_CALL_TEXT = 20_000             # characters of Python-style calls that we are willing to parse
THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
FENCED = re.compile(r"```\w*(.*?)(?:```|\Z)", re.DOTALL)
KEY = r'"(name|function|arguments|parameters|type"\s*:\s*"function)"'
LIKE_A_CALL = re.compile(r"\s*(\[\s*[\w.]+\(|(\[\s*)?\{\s*" + KEY + ")")
JSON_NAMES = {"true": True, "false": False, "null": None}
NOT_JSON = CallError("the call is not valid JSON, or has a key twice")
NOT_A_LIST = CallError("expected calls such as [name(argument=1)]")
TOO_LONG = CallError(f"the calls are longer than {MAX_CALL_TEXT} characters")


def goal_text(token: str) -> str:
    """What conditions a rollout: '\\n\\n[Reward Goal: <|high_reward|>]', appended to the first user message."""
    return f"\n\n[Reward Goal: {token}]"


# ---------------------------------------------------------------------------------------------------------------------
# what is read: the text of an assistant message -> calls

def parse_calls(text: str) -> list[Call | CallError]:
    """Read the calls in one assistant message; [] means that it answered in words.

    Styles: <tool_call>{JSON}</tool_call> blocks (Qwen, Hermes), JSON objects (Llama-3.1), [name(a=1), ...] (BFCL), and
    the last two within ``` fences. What looks like a call and cannot be read becomes a CallError, which the environment
    answers with an error result. What is thought is no call: between <think> and </think>, after a <think> without an
    end, and before a </think> without a beginning (the template wrote it). Within a call both are ordinary text.
    Never raises and never evaluates: JSON decoder and syntax tree only.
    """
    if len(text) > MAX_MESSAGE:
        return [CallError(f"the message is longer than {MAX_MESSAGE} characters")]
    spoken = THOUGHT.sub("", text).rpartition("</think>")[2]
    for part in (text, text.partition("</think>")[2], spoken) if spoken != text else (text,):
        calls = _bare(part)
        if calls and not any(isinstance(call, CallError) for call in calls):
            return calls                                 # '<tool_call>' or '<think>' stands in an argument
    return _blocks(text) or calls or _fenced(spoken)


def _bare(text):
    """A text that is calls from its first character on: JSON objects or a list."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    return _objects(text) if text.startswith("{") else _list(text) if text.startswith("[") else []


def _fenced(text):
    """Calls within ``` fences, whatever language they name; other code there is words."""
    parts = [found[1] for found in FENCED.finditer(text) if LIKE_A_CALL.match(found[1])]
    return [TOO_LONG] if parts and len(text) > MAX_CALL_TEXT else [call for part in parts for call in _bare(part)]


def _blocks(text):
    """<tool_call>{JSON}</tool_call> blocks, with anything between them (Qwen, Hermes style), but for thoughts."""
    calls, position = [], 0
    while mark := re.compile(r"<tool_call>\s*|</?think>").search(text, position):
        position = mark.end()
        if mark[0] == "</think>":                        # the template opened it: all of this was thought
            calls = []
        elif mark[0] == "<think>":
            position = THOUGHT.match(text, mark.start()).end()
        else:                                            # JSON-aware: '</tool_call>' in a string does not end the block
            call, position = _json_call(text, position)
            calls.append(call)
            if call is NOT_JSON:
                position = re.compile(r"</tool_call>|</think>|\Z").search(text, position).start()
    return calls


def _objects(text):
    """JSON objects one after the other, with blanks, commas or semicolons between (Llama-3.1 style)."""
    calls, position = [], 0
    while position < len(text) and NOT_JSON not in calls[-1:]:
        call, position = _json_call(text, position)
        calls.append(call)
        position = re.compile(r"[ \t\r\n;,]*").match(text, position).end()
    return calls


def _list(text):
    """A list of JSON objects, or [name(a=1), ...] (BFCL style)."""
    with suppress(ValueError, RecursionError):
        return [_as_call(item) for item in _json.decode(text)]
    if len(text) > MAX_CALL_TEXT:
        return [TOO_LONG]
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")                  # such as '1if': invalid decimal literal
        tree = ast.parse(text, mode="eval").body
        return [_python_call(node) for node in tree.elts] if isinstance(tree, ast.List) else [NOT_A_LIST]
    return [CallError("the calls could not be read; write them as [name(argument=1)]")]


def _object(pairs):
    """A decoded object or dict; ValueError where a key stands twice: which of the two values is meant?"""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


_json = json.JSONDecoder(parse_constant=int, object_pairs_hook=_object)         # int refuses NaN and Infinity


def _json_call(text, position):
    """The JSON value that begins here -> (a call or why it is none, the position behind it)."""
    with suppress(ValueError, RecursionError):
        value, position = _json.raw_decode(text, position)
        return _as_call(value), position
    return NOT_JSON, position


def _as_call(value):
    """A decoded JSON value -> a call, or why it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return CallError("a call is a JSON object with a name and arguments")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return CallError(f"arguments of {value['name'][:80]} must be a JSON object")
    return Call(value["name"], arguments)


def _python_call(node):
    """A syntax-tree node -> a call, or why it is none."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return NOT_A_LIST
    name = node.func.id[:80]
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return CallError(f"name every argument of {name}, as in {name}(argument=1)")
    try:
        return Call(node.func.id, _object([(keyword.arg, _literal(keyword.value)) for keyword in node.keywords]))
    except (ValueError, TypeError):
        return CallError(f"arguments of {name} must be literals, each given once")


def _literal(node):
    """The value of a syntax-tree node that is a plain literal or a bare word (text); ValueError for everything else."""
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.Name():
            return JSON_NAMES.get(node.id, node.id)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)) \
                if not isinstance(number, bool):
            return -number
        case ast.List() | ast.Tuple():
            return [_literal(item) for item in node.elts]
        case ast.Dict():
            return _object([(_literal(key), _literal(value)) for key, value in zip(node.keys, node.values)])
    raise ValueError("not a literal")


# ---------------------------------------------------------------------------------------------------------------------
# what is written: calls -> text

def _json_text(call, key, guard):
    return f'{{"name": "{guard(call.name)}", "{key}": {guard(json.dumps(call.arguments, ensure_ascii=False))}}}'


def _hermes(calls, guard=str):
    return "\n".join(f"<tool_call>\n{_json_text(call, 'arguments', guard)}\n</tool_call>" for call in calls)


def _llama(calls, guard=str):
    return "; ".join(_json_text(call, "parameters", guard) for call in calls)


def python_calls(calls, guard=str) -> str:
    """Calls as [name(argument= value), ...], the style of the compact block."""
    # every value follows a blank, as it does in the user's sentence: copied words then have the same ids
    given = [", ".join(f"{guard(key)}= {guard(_python_value(value))}" for key, value in call.arguments.items())
             for call in calls]
    return "[" + ", ".join(f"{guard(call.name)}({arguments})" for call, arguments in zip(calls, given)) + "]"


def _python_value(value):
    """A literal as python_calls writes it; plain words stand without quotes, and parse_calls reads them as text."""
    if isinstance(value, list):
        return "[" + ",".join(" " + _python_value(item) for item in value) + "]"
    bare = isinstance(value, str) and value.isascii() and value.isidentifier() and not iskeyword(value)
    return value if bare and value not in JSON_NAMES else json.dumps(value, ensure_ascii=False)


def signature(schema: dict) -> str:
    """A tool's JSON schema -> 'name(a, b, c?)'; '?' marks what may be left out."""
    function = schema["function"]
    parameters = function.get("parameters") or {}
    names = [name + "?" * (name not in parameters.get("required", [])) for name in parameters.get("properties", {})]
    return f"{function['name']}({', '.join(names)})"


# ---------------------------------------------------------------------------------------------------------------------
# what is written: messages -> ids

class Renderer:
    """Messages to ids for one tokenizer, append only.

    tokenizer: a fast tokenizer with a chat template (byte-level BPE, as in Qwen, Llama-3, SmolLM2). How tools are shown
    is read from tokenizer.init_kwargs["tool_schemas"], which is saved with the tokenizer, so that a checkpoint folder
    alone gives the same prompt: "template" (the template's own way where it has one, else full schemas in our block),
    "full" (our block, JSON schemas) or "compact" (our block, signatures only). A think block that the template opens is
    closed at once. Raises ValueError, in one line, for a tokenizer or a template that cannot be served: all that an
    episode may hold is tried here, so that nothing raises in the middle of one.
    """

    def __init__(self, tokenizer):
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; choose an instruct or chat model")
        self.tokenizer = tokenizer
        added = [token for token in tokenizer.added_tokens_decoder.values()      # runs of blanks (Gemma) are text
                 if token.special or len(token.content.strip()) > 1]
        added.sort(key=lambda token: -len(token.content))
        self._control = {token.content: tokenizer.convert_tokens_to_ids(token.content) for token in added}
        self._any_control = re.compile("|".join(map(re.escape, self._control)) or r"(?!)")
        cuts = [r"(?:(?<!\s)\s+)?" * token.lstrip + re.escape(token.content) + r"\s*" * token.rstrip for token in added]
        self._cuts = re.compile("(" + "|".join(cuts + [MARK]) + ")")

        self._asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": SLOT}]
        opening = self._template(self._asked[:1], generate=True)
        before, _, after = self._template(self._asked).partition(SLOT)
        end = self._any_control.match(after)
        if end is None:
            raise ValueError("the chat template does not end an assistant message with a control token")
        self.terminator = end[0]
        self.stop_ids = {self._control[self.terminator], tokenizer.eos_token_id} - {None}
        self._lead = before.removeprefix(opening) if before.startswith(opening) else ""      # such as Mistral's blank
        self._check_tokenizer()

        self.schemas = tokenizer.init_kwargs.get("tool_schemas", "template")
        if self.schemas not in ("template", "full", "compact"):
            raise ValueError(f"tool_schemas must be template, full or compact, not {self.schemas!r}")
        write = python_calls if self.schemas == "compact" else _hermes
        ways = [(True, write, system, tool) for system in (True, False) for tool in (True, False)]
        if self.schemas == "template":                   # only if it shows tools, calls and results as we write them
            ways = [(False, write, True, True) for write in (_hermes, _llama, python_calls)] + ways
        for self.own_block, self._write, self.system_role, self.tool_role in ways:
            try:
                return self._check_template()
            except ValueError as error:
                reason = error
        raise reason

    def prompt(self, messages: list[dict], tools: list[dict], token: str | None = None) -> list[int]:
        """The opening of an episode, up to where the first assistant message begins.

        messages: system messages if any, then the first user turn; tools: JSON schemas; token: HIGH, LOW or None.
        """
        return self.encode(self._template(*self._opening(messages, tools, token), generate=True))

    def answer(self, messages: list[dict]) -> list[int]:
        """What stands between the end of an assistant message and the start of the next: results, a user turn, both."""
        text = self._template(self._asked + self._turns(messages), generate=True)
        return self.encode(self.terminator + text.partition(SLOT + self.terminator)[2])[1:]

    def assistant(self, message: dict) -> list[int]:
        """An assistant message of a demonstration, in OpenAI's format: its words, its calls, then the terminator.

        Raises ValueError for arguments that are no JSON object, and for words beside calls that would hide them.
        """
        words, calls = message.get("content") or "", []
        for call in message.get("tool_calls") or []:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            with suppress(ValueError, RecursionError):
                arguments = _json.decode(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(arguments, dict):
                raise ValueError(f"a demonstration's call of {name[:80]} has arguments that are no JSON object")
            calls.append(Call(name, arguments))
        text = "\n".join(filter(None, [self.guard(words), calls and self.calls_text(calls)]))
        if words and calls and parse_calls(text.replace(MARK, "")) != calls:
            raise ValueError(f"a demonstration has words beside its call of {calls[0].name[:80]}"
                             " that hide it in this style")
        return self.encode(self._lead + text + self.terminator)

    def conversation(self, messages, tools, token=None) -> tuple[list[int], list[bool]]:
        """A whole conversation -> (ids, mask), both (T,); mask is True on assistant text and its terminator only.

        Ends after the last assistant message. Equals what the incremental calls give, id for id.
        """
        spoken = [message["role"] == "assistant" for message in messages]
        first, end = spoken.index(True), len(spoken) - spoken[::-1].index(True)
        ids = self.prompt(messages[:first], tools, token)
        mask = [False] * len(ids)
        for ours, group in groupby(messages[first:end], lambda message: message["role"] == "assistant"):
            piece = sum(map(self.assistant, group), []) if ours else self.answer(list(group))
            ids += piece
            mask += [ours] * len(piece)
        return ids, mask

    def calls_text(self, calls: list[Call]) -> str:
        """Calls in the style that this model reads and writes (the inverse of parse_calls)."""
        return self._write(calls, self.guard)

    def text(self, ids: list[int]) -> str:
        """The text of a sampled message, control tokens kept, its stop token removed."""
        ids = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def guard(self, data):
        """Text from outside, or plain data that holds some, with every control-token string in it marked as text."""
        if isinstance(data, dict):
            return {self.guard(key): self.guard(value) for key, value in data.items()}
        if isinstance(data, list):
            return [self.guard(item) for item in data]
        if not isinstance(data, str):
            return data
        text = data.replace(MARK, "").replace(SLOT, "")
        return self._any_control.sub(lambda found: found.group()[0] + MARK + found.group()[1:], text)

    def encode(self, text: str) -> list[int]:
        """Rendered text -> ids: control tokens by name, all else as text, marks removed, half characters as '?'."""
        ids = []
        for piece in self._cuts.split(text.encode("utf-8", "replace").decode()):
            if piece in self._control:
                ids.append(self._control[piece])
            elif piece and piece != MARK:
                ids += self.tokenizer(piece, add_special_tokens=False)["input_ids"]
        return ids

    def _template(self, messages, tools=None, generate=False):
        """The rendered text. Raises ValueError where the template refuses these messages."""
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=generate, tokenize=False, enable_thinking=False,
                date_string=PINNED_DATE, tools_in_user_message=False)
        except Exception as error:                       # templates raise whatever Jinja code raises
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"the chat template cannot be used: {reason}")
        return text.rstrip() + "\n\n</think>\n\n" if generate and text.rstrip().endswith("<think>") else text

    def _show(self, tools):
        one = signature if self.schemas == "compact" else functools.partial(json.dumps, ensure_ascii=False)
        return self.guard("\n".join(map(one, tools)))

    def _turns(self, messages):
        """Messages as the template shall see them: guarded, newly available tools spelled out. Without a tool role,
        results stand in a user turn, and user turns that follow each other are one."""
        turns = []
        for message in messages:
            content = self.guard(message.get("content") or "")
            if message.get("tools"):
                content += HANDED_OVER + self._show(message["tools"])
            if message["role"] == "tool" and not self.tool_role:
                message, content = {"role": "user"}, f"<tool_response>\n{content}\n</tool_response>"
            if turns and not self.tool_role and turns[-1]["role"] == message["role"] == "user":
                turns[-1]["content"] += "\n" + content
            else:
                kept = {key: message[key] for key in ("role", "name", "tool_calls") if key in message}
                turns.append({**self.guard(kept), "content": content})
        return turns

    def _opening(self, messages, tools, token=None):
        """The opening as the template shall see it -> (messages, tools): our block is in the system message or, without
        such a role, in the first user turn."""
        system = [self.guard(message["content"]) for message in messages if message["role"] == "system"]
        turns = self._turns([message for message in messages if message["role"] != "system"])
        first = next(turn for turn in turns if turn["role"] == "user")
        if token is not None:                            # after guarding: this control token is ours
            first["content"] += goal_text(token)
        if self.own_block and tools:
            block = COMPACT_BLOCK if self.schemas == "compact" else FULL_BLOCK
            system.append(block.format(tools=self._show(tools)))
        if system and not self.system_role:
            first["content"] = "\n\n".join(system + [first["content"]])
        elif system:
            turns.insert(0, {"role": "system", "content": "\n\n".join(system)})
        return turns, None if self.own_block else self.guard(tools)

    def _check_tokenizer(self):
        """ValueError for a tokenizer that changes text, or whose ids for a whole text are not those of its pieces."""
        hard = " It's  A b\n\n {} ,ü日本🙂 ?\tn't !\n"
        texts = [self.guard(text) for text in (hard.format(self.terminator), hard.strip(), "a\n", "  a", "\na ")]
        texts.append(self.terminator + "a b")
        talk = self._template([{"role": role, "content": hard} for role in ("user", "assistant", "user")], None, True)
        if any(self.text(self.encode(text)) != text.replace(MARK, "") for text in texts) or \
                self.encode(talk) != self.tokenizer(talk, add_special_tokens=False)["input_ids"]:
            raise ValueError(
                "the tokenizer does not give texts back as they were, or reads them otherwise beside control tokens; "
                "choose a model with a byte-level BPE tokenizer, as in Qwen, Llama-3, SmolLM2")

    def _check_template(self):
        """ValueError unless a conversation turn by turn is what the template makes of the whole, with nothing lost; but
        for empty think blocks, which templates write into the last assistant message only."""
        tool = {"type": "function", "function": {"name": "ProbeTool", "description": "d", "parameters": {
            "type": "object", "properties": {"a": {"type": "integer", "description": "d"}}, "required": ["a"]}}}
        call = Call("ProbeCall", {"a": 1, "b": "x"})
        roles = "user assistant tool tool assistant tool assistant user assistant tool user assistant".split()
        messages = [{"role": role, "content": f"Probe {i}.", **({"name": "f"} if role == "tool" else {})}
                    for i, role in enumerate(roles)]
        messages[4].update(content="", tool_calls=[{"type": "function", "function": call._asdict()}])
        messages[7]["tools"] = [tool]
        for system, tools in ([], []), ([{"role": "system", "content": "Probe system."}], [tool]):
            opening, shown = self._opening(system + messages[:1], tools)
            told = [{"role": "assistant", "content": self.calls_text([call])}] if self.own_block else messages[4:5]
            whole = self._template(opening + self._turns(messages[1:4] + told + messages[5:]), shown)
            ours, theirs = (re.sub(r"<think>\s*</think>\s*", "", self.text(ids)) for ids in (
                self.conversation(system + messages, tools)[0], self.encode(whole)))
            words = ["ProbeCall"] + [message["content"] for message in system + messages]
            lost = any(word not in ours for word in words) or ours.count("ProbeTool") <= len(tools)
            if lost or not theirs.startswith(ours):
                raise ValueError("the chat template cannot be used: it writes a conversation "
                                 "otherwise than turn by turn")
