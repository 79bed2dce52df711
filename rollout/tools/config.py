"""Settings of the tools (`tools` of a run). Imports only pydantic."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from marsrl.rollout.config import (
    MOST_MIB,
    Count,
    CountOr0,
    HttpUrl,
    Ranks,
    Seconds,
    SecondsOr0,
    Settings,
    Size,
    SizeOr0,
    Tokens,
    VariableName,
)

_KIND = "index: a local file's documents; http: a retrieval server (search only); serpapi: Google, through SerpApi"


class ToolLimits(Settings):
    """Limits of every tool."""

    timeout_s: Seconds = Field(
        60.0, description="time limit of a call; a longer call is an error, and its thread is abandoned"
    )
    concurrency: Ranks = 8
    """maximum concurrent calls. As many again may still hang after timeout_s; then new calls are rejected until one ends"""
    max_output_chars: Tokens = 16_000
    """maximum length of one output, all parts together; the longest parts are cut to fit, with a mark"""
    cache_mib: SizeOr0 = Field(64, description="cache of outputs for repeated calls, MiB; 0: none")


class IndexSearch(ToolLimits):
    """Search of a file's documents in an SQLite index, in the trainer's process."""

    kind: Literal["index"] = Field("index", description=_KIND)
    corpus: str | None = None
    """jsonl of {id, title, text} or {id, contents} (Search-R1); null: the task's own documents"""
    index: str | None = None
    """index file; built if it is missing or the corpus has changed; null: a temporary file"""
    top_k: int = Field(3, gt=0, le=100, description="maximum documents per query")


class IndexScholar(IndexSearch):
    """Search of a file's papers in an SQLite index."""

    corpus: str | None = None
    """jsonl of {id, title, abstract, year, citations}; null: the task's own papers"""
    top_k: int = Field(5, gt=0, le=100, description="maximum papers per query")


class ServerLimits(ToolLimits):
    """Limits of a tool that queries a server."""

    request_timeout_s: Seconds = 10.0
    """time limit of one attempt, from connection to last byte; timeout_s limits all attempts together"""
    retries: CountOr0 = Field(3, description="retries after 429, 5xx, or a failed connection")
    backoff_s: SecondsOr0 = Field(0.5, description="delay before the first retry; doubles, up to 60 s")
    max_response_kib: Size = Field(4096, description="maximum response size, KiB")


class HttpSearch(ServerLimits):
    """Retrieval server with POST /retrieve, as in Search-R1 and Dr. MAS (`marsrl serve-retrieval` is one)."""

    kind: Literal["http"] = Field(description=_KIND)
    url: HttpUrl = Field(description="http(s)://host[:port]/retrieve")
    top_k: int = Field(3, gt=0, le=100, description="maximum documents per query")


class SerpApiSearch(ServerLimits):
    """Google, through a server with SerpApi's GET /search.json."""

    kind: Literal["serpapi"] = Field(description=_KIND)
    base_url: HttpUrl = Field(
        "https://serpapi.com", description="http(s)://host[:port]; requests go to base_url/search.json"
    )
    api_key_env: VariableName = "SERPAPI_API_KEY"
    """environment variable that holds the key, never the key itself"""
    top_k: int = Field(10, gt=0, le=100, description="maximum pages per query")
    read_pages: bool = False
    """return the main text of found pages, not only their snippets (tools.pages; raise max_output_chars)"""


class SerpApiScholar(SerpApiSearch):
    """Google Scholar, through a server with SerpApi's GET /search.json."""

    top_k: int = Field(5, gt=0, le=20, description="maximum papers per query")


SearchConfig = Annotated[IndexSearch | HttpSearch | SerpApiSearch, Field(discriminator="kind")]
ScholarConfig = Annotated[IndexScholar | SerpApiScholar, Field(discriminator="kind")]


class PythonTool(ToolLimits):
    """Interpreter for code that a model wrote, with a fresh sandbox for each call (docs/python.md)."""

    wall_s: Seconds = Field(20.0, description="time limit of a snippet, which is stopped then; must be below timeout_s")
    cpu_s: Count = Field(10, description="maximum CPU time of a process, s")
    memory_mib: int = Field(512, ge=64, le=MOST_MIB, description="maximum address space of a process, MiB")
    processes: Count = Field(4, description="maximum processes and threads, including the interpreter")
    tmp_mib: Size = Field(16, description="maximum total size of files that a snippet writes (in /tmp), MiB")
    warm: Ranks = Field(8, description="interpreters started ahead, each for one call, about 10 MiB each")
    packages: str | None = None
    """folder of packages that snippets may import besides the standard library; snippets can read the whole folder"""
    preload: list[str] = Field([], description="modules that an interpreter imports before its call")

    @model_validator(mode="after")
    def _ends_before_its_thread_is_given_up(self) -> PythonTool:
        if self.wall_s >= self.timeout_s:
            raise ValueError(
                f"tools.python.wall_s is {self.wall_s:g} and tools.python.timeout_s is {self.timeout_s:g}; expected "
                f"timeout_s above wall_s, to include the wait for an interpreter: set tools.python.timeout_s={2 * self.wall_s:g}"
            )
        return self


class VisitTool(ToolLimits):
    """Web pages by address, read with the limits of tools.pages."""

    timeout_s: Seconds = Field(120.0, description="time limit of a call, for all its pages together")
    max_output_chars: Tokens = 400_000
    """maximum length of one output, all pages together; the longest are cut to fit"""


class PagesConfig(ToolLimits):
    """Reading of web pages, for tools.visit and searches with read_pages (docs/tools.md)."""

    timeout_s: Seconds = 30.0
    """time limit of one page, from resolving its host to its main text, however slowly data arrives"""
    concurrency: Ranks = Field(16, description="maximum concurrent pages, for all tools together")
    max_output_chars: Tokens = Field(
        100_000, description="maximum length of a page's main text; longer ones are cut, with a mark"
    )
    cache_mib: SizeOr0 = Field(256, description="cache of main texts by address, MiB; 0: none")
    max_kib: Size = Field(8192, description="maximum page size, as sent and as decompressed, KiB")
    workers: Ranks = Field(2, description="processes that parse pages; hung or crashed ones are replaced")
    memory_mib: int = Field(
        1024, ge=256, le=MOST_MIB, description="maximum address space of a process that parses pages, MiB"
    )
    allow_hosts: list[str] = Field([])
    """hosts, as written in addresses, that may have a private IP address, such as an internal wiki; all others must be
    public"""
    user_agent: str = Field("marsrl", pattern=r"^[\x21-\x7e][\x20-\x7e]*$")
    """User-Agent header sent to servers"""

    @field_validator("allow_hosts")
    @classmethod
    def _are_hosts(cls, value: list[str]) -> list[str]:
        for host in value:
            if not re.fullmatch(r"[0-9A-Za-z._:-]+", host) or re.fullmatch(r"[^:]+:\d+", host):
                raise ValueError(
                    f"{host!r:.80} is not a host; expected a name or an IP address, without scheme, port and path"
                )
        return [host.lower() for host in value]


class OwnTool(ToolLimits):
    """A user's tool."""

    deterministic: bool = False
    """true: equal arguments have equal outputs for the whole run, so that outputs may be cached (cache_mib)"""


class FunctionTool(OwnTool):
    """A user's Python function; each call runs in a separate process."""

    kind: Literal["function"] = Field(description="function: from a Python file; mcp: from an MCP server")
    function: str = Field(pattern=r".+\.py:[A-Za-z_]\w*$")
    """FILE.py:FUNCTION, with annotations and a docstring; sync or async"""
    memory_mib: int = Field(4096, ge=256, le=MOST_MIB, description="maximum address space of a call's process, MiB")


class McpServer(OwnTool):
    """Tools of a Model Context Protocol server: a command that the run starts, or a URL."""

    kind: Literal["mcp"] = Field(description="function: from a Python file; mcp: from an MCP server")
    command: list[str] | None = Field(None, min_length=1)
    """the server's command and its arguments; communicates over stdin and stdout"""
    url: HttpUrl | None = Field(None, description="http(s)://host[:port]/mcp of a server with streamable HTTP")
    tools: list[str] | None = Field(None, min_length=1, description="tools of the server to use; null: all")
    environment: list[str] = Field([])
    """names of environment variables that the command gets in addition to PATH, HOME and the like"""
    api_key_env: VariableName | None = None
    """environment variable with the bearer token for url, never the token itself"""

    @model_validator(mode="after")
    def _is_one_server(self) -> McpServer:
        if (self.command is None) == (self.url is None):
            raise ValueError("a tool of kind mcp needs either a command or a url; set exactly one of them")
        if (self.environment and self.url) or (self.api_key_env and self.command):
            raise ValueError(
                "environment requires a command, and api_key_env a url; remove the one that does not apply"
            )
        return self


TOOL_NAMES = ("search", "scholar", "visit", "python")
"""Names of the built-in tools."""

_OWN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_TAKEN = ("unknown", "pages")  # reserved in metrics: tools that do not exist, and pages that visit and read_pages read


def how_to_set(name: str) -> str:
    """Return the setting that gives a run this tool."""
    return f"tools.{name}={{}}" if name in ("visit", "python") else f"tools.{name}.kind"


class ToolsConfig(Settings):
    """Tools that agents can call, by name, and the limits of reading pages; names not listed here are users' tools."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[
        str,
        Annotated[
            FunctionTool | McpServer,
            Field(discriminator="kind", description="your own tool, under a name of your choice"),
        ],
    ] = Field(init=False)

    search: SearchConfig | None = None
    """kind: index (a corpus file), http (a retrieval server) or serpapi"""
    scholar: ScholarConfig | None = Field(None, description="kind: index (a file of papers) or serpapi")
    visit: VisitTool | None = Field(None, description="reads web pages; {}: defaults")
    python: PythonTool | None = Field(None, description="a sandboxed interpreter (docs/python.md); {}: its defaults")
    pages: PagesConfig = PagesConfig()

    @model_validator(mode="before")
    @classmethod
    def _others_are_own_tools(cls, section: Any) -> Any:
        for name, settings in section.items() if isinstance(section, dict) else ():
            if name in cls.model_fields:
                continue
            kind = settings.get("kind") if isinstance(settings, Mapping) else getattr(settings, "kind", None)
            if kind not in ("function", "mcp"):
                raise ValueError(
                    f"tools.{name} is not a built-in tool ({', '.join(TOOL_NAMES)}); for your own tool, set its kind to "
                    "function or mcp (docs/tools.md)"
                )
            if not _OWN_NAME.fullmatch(str(name)) or name in _TAKEN:
                raise ValueError(
                    f"tools.{name}: expected a name of at most 64 letters, digits and _, other than {' and '.join(_TAKEN)}"
                )
        return section

    @property
    def given(self) -> dict[str, ToolLimits]:
        """Settings of the tools that are set, by name."""
        shipped = {name: getattr(self, name) for name in TOOL_NAMES}
        return {name: each for name, each in shipped.items() if each is not None} | (self.__pydantic_extra__ or {})
