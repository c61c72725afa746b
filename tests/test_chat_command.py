"""`chat` as a user meets it: by lines of stdin, on a terminal, and its commands."""

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from talking import Fake, write_tokenizer

from mosaic_c import synth
from mosaic_c.commands.chat_talk import Talk, is_open, unpacked
from mosaic_c.conversation import Conversation
from mosaic_c.dialogue import Message, Settings

STORY, WHO = "Tell me a story about Mia and a kite.", "Who had the kite?"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RAM = ("--ram", "300M")


def chat(stdin, *args, env=None):
    argv = [sys.executable, "-m", "mosaic_c", "chat", *map(str, args)]
    data = stdin if isinstance(stdin, bytes) else stdin.encode()
    env = os.environ | (env or {})
    return subprocess.run(argv, input=data, capture_output=True, timeout=60, env=env)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Random weights, and no token that ends an answer."""
    folder = tmp_path_factory.mktemp("synth") / "tiny"
    synth.write(folder, "tiny", progress=False)
    (folder / "chat_template.jinja").write_text(CHATML)
    for path in folder.glob("*config.json"):
        config = json.loads(path.read_text())
        for part in (config, config.get("text_config", {})):
            part |= {name: None for name in ("eos_token", "eos_token_id") if name in part}
        path.write_text(json.dumps(config))
    return folder


# ---- lines of stdin ----


def test_a_conversation_by_pipe(tmp_path):
    saved = tmp_path / "c.json"
    lines = [STORY, WHO, "/undo", '"""', "Tom has a red boat.", "Who has the boat?", '"""', "Tom has a pig.\\",
             "Who has the pig?", "/nonsense", "/set heat 3", f"/save {saved} state", "/stats"]  # fmt: skip
    r = chat("\n".join(lines), "-v", *RAM)
    err = r.stderr.decode()
    story, *answers = r.stdout.decode().splitlines()
    assert story.startswith("Mia ") and story.endswith("with a smile.")
    assert len(answers) == 3 and answers[0] == "The kite belonged to Mia."
    assert "reused 0 of 18 tokens" in err and "reused 147 of 162 tokens" in err
    assert "taken back" in err and err.count("unknown command") == err.count("unknown setting") == 1
    assert "hits" in err and "context " in err
    assert r.returncode == 1  # of the two lines that nothing came of
    said = [m["content"] for m in json.loads(saved.read_text())["messages"]]
    assert said[2] == "Tom has a red boat.\nWho has the boat?" and len(said) == 6
    assert said[4] == "Tom has a pig.\nWho has the pig?"
    # and on it goes in another process
    r = chat(f"/load {saved}\n{WHO}", "-v", *RAM)
    err = r.stderr.decode()
    assert (
        r.returncode == 0 and "6 messages" in err and "state of " in err and "reused 0" not in err
    )
    assert len(r.stdout.decode().splitlines()) == 1


def test_the_default_model_is_the_one_in_the_box_and_quiet_is_quiet():
    r = chat(f"{WHO}\n", "-q", "--temp", 0, *RAM)
    assert r.returncode == 0 and r.stderr == b"" and r.stdout.count(b"\n") == 1
    assert b"no --model" in chat("", *RAM).stderr


def test_sampling_options_and_seed(tiny):
    by = ("-m", tiny, "-n", 8, "--temp", 1.0, "--seed", 3, *RAM)
    a, b = chat("x\n", *by), chat("x\n", *by)
    assert a.stdout == b.stdout and a.returncode == 0
    assert a.stdout != chat("x\n", *by[:-3], 4, *RAM).stdout
    assert b"cut after 8 tokens" in a.stderr
    assert chat("x\n/set seed 4\n/retry\n", *by).stdout.startswith(a.stdout)


def test_errors_are_one_line(tmp_path, tiny):
    for stdin, args, status, words in (
        ("x\n", ("--temp", -1), 2, "temperature: expected"),
        ("x\n", ("-n", 0), 2, "max_new_tokens: expected"),
        ("x\n", ("-m", tmp_path), 1, "tokenizer.json"),
        (b"caf\xe9\n", (), 1, "UTF-8"),
        ("q" * 9000 + "\n", ("--ctx", 256), 1, "the conversation is full"),
    ):  # fmt: skip
        r = chat(stdin, "-q", *RAM, *args)
        lines = r.stderr.decode().strip().splitlines()
        assert r.returncode == status and len(lines) == 1 and words in lines[0], r.stderr
        assert r.stdout == b""


def test_no_think_and_system(tmp_path):
    file = tmp_path / "c"
    r = chat(f"{WHO}\n/save {file}\n", "--no-think", "--system", "Be kind.", "-q", *RAM)
    assert b"no switch for thinking: the model has no thinking" in r.stderr and r.returncode == 0
    saved = json.loads(file.read_text())
    assert saved["messages"][0] == {"role": "system", "content": "Be kind."}
    assert saved["settings"] == {"think": False} and saved["model"] == "demo"


def test_interrupt_by_pipe(tiny):
    """Ctrl-C stops the answer between two tokens and ends the command."""
    argv = [sys.executable, "-m", "mosaic_c", "chat", "-m", str(tiny), "--isa", "scalar", *RAM]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe) as p:
        p.stdin.write(b"x\nagain\n")
        p.stdin.flush()
        assert p.stdout.read(20)
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=20)
    assert p.returncode == 130 and b"stopped" in err and b"Traceback" not in err
    assert out.endswith(b"\n")


# ---- commands ----


class Recorder:
    def __init__(self):
        self.notes, self.said, self.ends = [], [], 0

    def note(self, text):
        assert "\n" not in text
        self.notes.append(text)

    def part(self, kind, text):
        self.said.append((kind, text))

    def end(self):
        self.ends += 1

    @contextmanager
    def progress(self, total):
        class Bar:
            def __call__(self, done, of):
                assert 0 <= done <= of

            def close(self):
                pass

        yield Bar()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tok"))


@pytest.fixture
def talk(tokenizer):
    with Conversation(Fake(tokenizer), settings=Settings(max_new_tokens=6)) as conversation:
        yield Talk(conversation, Recorder(), "fake")


def test_commands(talk, tmp_path, monkeypatch):
    c, notes = talk.conversation, talk.screen.notes
    assert talk.line("ab") and [m.role for m in c.messages] == ["user", "assistant"]
    assert talk.line("//help me") and c.messages[2].content == "/help me"
    talk.line("/* code */\nmain")  # of several lines: pasted
    talk.line("// code\nmain")
    assert [m.content for m in c.messages[4::2]] == ["/* code */\nmain", "// code\nmain"]
    talk.line("/undo")
    talk.line("/undo")
    talk.line("/undo")
    assert len(c.messages) == 2 and "/help me" in notes[-1]
    talk.line("/retry")
    assert len(c.messages) == 2 and any("greedy" in n for n in notes)
    talk.line("/system be kind")
    assert c.messages[0] == Message("system", "be kind")
    talk.line("/reset")
    assert c.messages == [Message("system", "be kind")]
    for line, name, want in (
        ("/set temperature 0.5", "temperature", 0.5), ("/set top_k 7", "top_k", 7), ("/set seed 9", "seed", 9),
        ("/set think off", "think", False), ("/set temperature default", "temperature", None),
        ("/set max_new_tokens none", "max_new_tokens", None), ("/set min_p 0.5", "min_p", 0.5),
    ):  # fmt: skip
        talk.line(line)
        assert getattr(c.settings, name) == want, notes[-1]
    assert not talk.failed
    before = c.settings
    for line in ("/set temperature hot", "/set top_k 1.5", "/set top_p 7", "/set heat 1", "/set think perhaps",
                 "/set max_new_tokens 0", "/what", "/", "/load /none", "/load", "/save", "/save a\0b",
                 "/load a\0b"):  # fmt: skip
        talk.failed, count = False, len(notes)
        assert talk.line(line) and talk.failed and len(notes) == count + 1
    assert c.settings == before
    talk.line("/set")
    assert any(n.startswith("think") and "false" in n for n in notes)
    talk.line("/help")
    assert all(any(n.startswith(f"/{name}") for n in notes) for name in ("set", "load", "quit"))
    assert "context" in talk.status()
    assert not talk.line("/quit") and talk.line("   ")
    # ~ is a user's folder
    monkeypatch.setenv("HOME", str(tmp_path))
    talk.line("ab")
    talk.line("/save ~/a b.json")
    messages, settings = c.messages, c.settings
    talk.line("/reset")
    talk.line("/load ~/a b.json")
    assert (tmp_path / "a b.json").exists() and (c.messages, c.settings) == (messages, settings)


def test_load_of_another_model_or_of_bad_settings(talk, tmp_path):
    path = tmp_path / "c"
    talk.line("ab")
    talk.line(f"/save {path}")
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "model": "other"}))
    talk.line(f"/load {path}")
    assert 'with "other"' in talk.screen.notes[-1]
    messages = talk.conversation.messages
    path.write_text(json.dumps({**saved, "settings": {"top_p": 5}}))
    talk.line(f"/load {path}")
    assert "top_p" in talk.screen.notes[-1] and talk.conversation.messages is messages
    talk.failed = False
    path.write_text(json.dumps(saved))
    (tmp_path / "c.state").write_bytes(b"x")  # it costs the next turn time, no more
    talk.line(f"/load {path}")
    assert "state is not used" in talk.screen.notes[-1] and talk.line("ab") and not talk.failed


def test_notes_of_an_answer(talk):
    tok, model = talk.conversation.tokenizer, talk.conversation.model
    model.script = [9] * 200
    talk.conversation.set(max_new_tokens=60)
    talk.line("ab")
    notes = " ".join(talk.screen.notes)
    assert "cut after 60" in notes and "still thinking: /set think off" in notes
    assert "same again and again" in notes
    talk.screen.notes.clear()
    model.script = [
        *[9] * 2,
        tok.token_id("</think>"),
        *tok.encode("Yes", False),
        tok.token_id("<|im_end|>"),
    ]
    talk.line("/reset")
    talk.line("ab")
    assert talk.screen.notes[1:] == [] and talk.screen.said[-1][0] == "content"


def test_blocks_and_slashes():
    assert unpacked('"""\na\nb\n"""') == "a\nb" and unpacked('"""a"""') == "a"
    assert unpacked("//a") == "/a" and unpacked(" a ") == " a "
    assert is_open('"""') and is_open('"""a\n') and not is_open('"""a"""') and not is_open("a")


# ---- the terminal ----


def keys(text, **kwargs):
    """What the line editor makes of keys."""
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    from mosaic_c.commands import chat_terminal

    with create_pipe_input() as pipe:
        pipe.send_text(text)
        history = InMemoryHistory(kwargs.get("before", []))
        return chat_terminal.prompt(history, input=pipe, output=DummyOutput()).prompt()


UP, ALT_ENTER, PASTE = "\x1b[A", "\x1b\r", "\x1b[200~{}\x1b[201~"


@pytest.mark.parametrize(
    ("typed", "want"),
    [
        ("hello\r", "hello"),
        ("one" + ALT_ENTER + "two\r", "one\ntwo"),
        ("one\\\rtwo\r", "one\ntwo"),
        ('"""one\rtwo"""\r', '"""one\ntwo"""'),
        (PASTE.format("one\ntwo\n/three") + "\r", "one\ntwo\n/three"),
        (PASTE.format("a\r\nb") + " c\r", "a\nb c"),
        ("wrong\x03right\r", "right"),
        (UP + "\r", "last"),
        (UP + UP + "\r", "first"),
    ],
    ids=repr,
)
def test_editing(typed, want):
    pytest.importorskip("prompt_toolkit")
    assert keys(typed, before=["first", "last"]) == want


def test_leaving():
    pytest.importorskip("prompt_toolkit")
    with pytest.raises(EOFError):
        keys("\x04")
    with pytest.raises(KeyboardInterrupt):
        keys("\x03")


def test_thinking_is_dimmed(capsys, monkeypatch):
    pytest.importorskip("prompt_toolkit")
    from mosaic_c.commands.chat_terminal import Terminal

    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal(None, None)
    for part in (("reasoning", "hm"), ("reasoning", " so"), ("content", "Yes"), ("content", ".")):
        screen.part(*part)
    screen.end()
    screen.note("a note")
    out = capsys.readouterr().out
    assert out == "\x1b[2mhm\x1b[0m\x1b[2m so\x1b[0m\nYes.\n\x1b[2ma note\x1b[0m\n"
    monkeypatch.setenv("TERM", "dumb")
    Terminal(None, None).part("reasoning", "hm")
    assert capsys.readouterr().out == "hm"


def test_what_a_model_says_does_not_steer_the_terminal():
    pytest.importorskip("prompt_toolkit")
    from mosaic_c.commands.report import visible

    assert (
        visible("a\x1b[2J\x07\r\n\t\u00e9\x9b\U0001f600")
        == "a\\x1b[2J\\x07\\r\n\t\u00e9\\x9b\U0001f600"
    )


def test_nor_does_it_without_the_line_editor(monkeypatch):
    from mosaic_c.commands.chat import Plain

    for tty, want in ((True, "a\\x1b[2J\n"), (False, "a\x1b[2J\n")):
        for name in ("stdout", "stderr"):
            stream = io.StringIO()
            stream.isatty = lambda tty=tty: tty
            monkeypatch.setattr(sys, name, stream)
        screen = Plain(None, None)
        for kind in ("reasoning", "content"):
            screen.part(kind, "a\x1b[2J")
        screen.end()
        assert sys.stdout.getvalue() == sys.stderr.getvalue() == want


class Seat:
    """A user at a terminal."""

    def __init__(self, home, *args):
        import pexpect

        env = os.environ | {"XDG_STATE_HOME": str(home), "TERM": "xterm"}
        argv = ["-m", "mosaic_c", "chat", *map(str, args), *RAM]
        self.p = pexpect.spawn(
            sys.executable, argv, env=env, encoding="utf-8", timeout=20, dimensions=(24, 120)
        )
        self.p.delaybeforesend = None

    def ready(self):
        """The prompt is there: its editor asks where the cursor is, and then draws the line of numbers."""
        self.p.expect_exact("\x1b[6n")
        self.p.send("\x1b[1;1R")
        self.p.expect("RAM .* of 300 MiB .* left")

    def say(self, text):
        self.p.send(text)
        self.p.send("\r")

    def streams(self):
        """The editor is gone and words come."""
        self.p.expect_exact("\x1b[?2004l")
        self.p.expect("(?s)[a-z]{2}.*[a-z]{2}.*[a-z]{2}")

    def leave(self):
        import pexpect

        self.p.send("\x04")
        self.p.expect(pexpect.EOF)
        self.p.close()
        return self.p.exitstatus


def test_at_a_terminal(tmp_path):
    pytest.importorskip("pexpect")
    pytest.importorskip("prompt_toolkit")
    seat = Seat(tmp_path)
    seat.p.expect("Ctrl-D leaves")
    seat.ready()
    seat.say(STORY)
    seat.p.expect("with a smile")
    seat.ready()
    seat.say(PASTE.format("Tom has a red boat.\nWho has the boat?"))
    seat.p.expect("boat")
    seat.ready()
    seat.p.send("\x03")
    seat.p.expect("Ctrl-D or /quit leaves")
    seat.ready()
    seat.say("/undo")
    seat.p.expect("taken back: .*Tom has a red boat")
    seat.ready()
    assert seat.leave() == 0
    history = tmp_path / "mosaic_c" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert STORY in history.read_text() and "+Who has the boat?" in history.read_text()


def test_ctrl_c_at_a_terminal_stops_the_answer_alone(tmp_path, tiny):
    pytest.importorskip("pexpect")
    pytest.importorskip("prompt_toolkit")
    seat = Seat(tmp_path, "-m", tiny, "--isa", "scalar", "-v")
    seat.ready()
    seat.say("x")
    seat.streams()
    seat.p.sendintr()
    seat.p.expect("stopped; what was said so far stays")
    seat.p.expect(r"(\d+) tokens of answer")
    assert int(seat.p.match[1]) > 0
    seat.ready()
    seat.say("/retry")
    seat.streams()
    seat.p.sendintr()
    seat.p.expect("stopped")
    seat.ready()
    assert seat.leave() == 0


def test_a_terminal_without_the_extra(tmp_path):
    """One line that says what to install."""
    pytest.importorskip("pexpect")
    import pexpect

    (tmp_path / "prompt_toolkit.py").write_text("raise ImportError('none')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    argv = ["-m", "mosaic_c", "chat"]
    p = pexpect.spawn(sys.executable, argv, env=os.environ | {"PYTHONPATH": path}, encoding="utf-8")
    p.expect(r"pip install '\.\[chat\]'")
    p.expect(pexpect.EOF)
    p.close()
    assert p.exitstatus == 1 and "Traceback" not in p.before


def test_saving_replaces_no_device_and_nothing_beside(tmp_path):
    """A pipe is refused; a file of another that looks like a temporary one stays."""
    from mosaic_c import dialogue
    from mosaic_c.errors import MosaicError

    pipe, other = tmp_path / "pipe", tmp_path / "talk.json.part"
    os.mkfifo(pipe)
    other.write_text("mine")
    for path in (pipe, "/dev/null"):
        with pytest.raises(MosaicError, match="it is neither"):
            dialogue.write(path, "demo", [], dialogue.Settings())
    dialogue.write(tmp_path / "talk.json", "demo", [], dialogue.Settings())
    assert other.read_text() == "mine" and (tmp_path / "talk.json").stat().st_mode & 0o77 == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pipe", "talk.json", "talk.json.part"]


def test_several_lines_that_begin_with_a_command_are_a_message():
    from mosaic_c.commands.chat_talk import Talk

    said = []
    talk = Talk.__new__(Talk)
    talk._commands = {"reset": (lambda rest: said.append(("reset", rest)), "")}
    talk._answer = lambda text: said.append(("answer", text))
    talk.conversation = type("C", (), {"say": staticmethod(lambda text: text)})
    assert talk.line("/reset") and talk.line("/reset the counter\nint main() {}")
    assert said == [("reset", ""), ("answer", "/reset the counter\nint main() {}")]
