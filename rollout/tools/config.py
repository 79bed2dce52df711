"""Settings of the tools (`tools` of a run). Import-light: pydantic only."""

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

_KIND = "who answers: index: a file's documents, here; http: a retrieval server (search alone); serpapi: Google, through SerpApi"


class ToolLimits(Settings):
    """Limits of every tool."""

    timeout_s: Seconds = Field(60.0, description="a call that runs longer is an error; its thread is given up")
    concurrency: Ranks = 8
    """calls that run at once; as many may hang beyond timeout_s, then further ones are refused until one ends"""
    max_output_chars: Tokens = 16_000
    """of one output, all its parts together; the longest of them are cut to fit, with a mark"""
    cache_mib: SizeOr0 = Field(64, description="outputs kept for calls that are repeated, MiB; 0: none")


class IndexSearch(ToolLimits):
    """Documents of a file, in an index of SQLite's, in the trainer's process."""

    kind: Literal["index"] = Field("index", description=_KIND)
    corpus: str | None = None
    """jsonl of {id, title, text} or {id, contents} (Search-R1); null: the task's own documents"""
    index: str | None = None
    """file that keeps the index; made where it is missing or the corpus has changed; null: a temporary one"""
    top_k: int = Field(3, gt=0, le=100, description="documents that a query shows, at most")


class IndexScholar(IndexSearch):
    """Papers of a file, in an index of the same kind."""

    corpus: str | None = None
    """jsonl of {id, title, abstract, year, citations}; null: the task's own papers"""
    top_k: int = Field(5, gt=0, le=100, description="papers that a query shows, at most")


class ServerLimits(ToolLimits):
    """Limits of a tool that asks a server."""

    request_timeout_s: Seconds = 10.0
    """one attempt, from connection to last byte; timeout_s is all of them"""
    retries: CountOr0 = Field(3, description="further attempts after 429, 5xx, or a failed connection")
    backoff_s: SecondsOr0 = Field(0.5, description="wait before the first retry; doubles, up to 60 s")
    max_response_kib: Size = Field(4096, description="a larger answer is refused, KiB")


class HttpSearch(ServerLimits):
    """A server that answers POST /retrieve as Search-R1's and Dr. MAS's do (`marsrl serve-retrieval` is one)."""

    kind: Literal["http"] = Field(description=_KIND)
    url: HttpUrl = Field(description="http(s)://host[:port]/retrieve")
    top_k: int = Field(3, gt=0, le=100, description="documents that a query shows, at most")


class SerpApiSearch(ServerLimits):
    """Google, by a server that answers GET /search.json as SerpApi's does."""

    kind: Literal["serpapi"] = Field(description=_KIND)
    base_url: HttpUrl = Field("https://serpapi.com", description="http(s)://host[:port]; asked is base_url/search.json")
    api_key_env: VariableName = "SERPAPI_API_KEY"
    """environment variable that holds the key; never the key itself"""
    top_k: int = Field(10, gt=0, le=100, description="pages that a query shows, at most")
    read_pages: bool = False
    """show the main text of the pages found, not their snippets alone (tools.pages; raise max_output_chars)"""


class SerpApiScholar(SerpApiSearch):
    """Google Scholar, by the same."""

    top_k: int = Field(5, gt=0, le=20, description="papers that a query shows, at most")


SearchConfig = Annotated[IndexSearch | HttpSearch | SerpApiSearch, Field(discriminator="kind")]
ScholarConfig = Annotated[IndexScholar | SerpApiScholar, Field(discriminator="kind")]


class PythonTool(ToolLimits):
    """An interpreter for code that a model wrote, a fresh sandbox for each call (docs/python.md)."""

    wall_s: Seconds = Field(20.0, description="a snippet that runs longer is stopped; below timeout_s")
    cpu_s: Count = Field(10, description="CPU time of a process, s")
    memory_mib: int = Field(512, ge=64, le=MOST_MIB, description="address space of a process, MiB")
    processes: Count = Field(4, description="processes and threads at once, the interpreter one of them")
    tmp_mib: Size = Field(16, description="all files together that a snippet may write, in /tmp, MiB")
    warm: Ranks = Field(8, description="interpreters started ahead, each for one call, about 10 MiB each")
    packages: str | None = None
    """folder of packages that snippets may import beside the standard library; they can read all of it"""
    preload: list[str] = Field([], description="modules that an interpreter imports before its call")

    @model_validator(mode="after")
    def _ends_before_its_thread_is_given_up(self) -> PythonTool:
        if self.wall_s >= self.timeout_s:
            raise ValueError(
                f"tools.python.wall_s is {self.wall_s:g} and tools.python.timeout_s is {self.timeout_s:g}, which holds the wait "
                f"for an interpreter too; set tools.python.timeout_s={2 * self.wall_s:g}"
            )
        return self


class VisitTool(ToolLimits):
    """Pages by their addresses, as tools.pages reads them."""

    timeout_s: Seconds = Field(120.0, description="a call, all its pages together")
    max_output_chars: Tokens = 400_000
    """of one output, all its pages together; the longest are cut to fit"""


class PagesConfig(ToolLimits):
    """Pages of the web, as tools.visit and searches with read_pages read them (docs/tools.md)."""

    timeout_s: Seconds = 30.0
    """a page, from looking up its host to its main text, however slowly it drips"""
    concurrency: Ranks = Field(16, description="pages at once, for all tools together")
    max_output_chars: Tokens = Field(100_000, description="of one page's main text; a longer one is cut, with a mark")
    cache_mib: SizeOr0 = Field(256, description="main texts kept by their addresses, MiB; 0: none")
    max_kib: Size = Field(8192, description="a page that is larger, as sent or decompressed, is refused, KiB")
    workers: Ranks = Field(2, description="processes that parse pages; one that hangs or crashes is replaced")
    memory_mib: int = Field(1024, ge=256, le=MOST_MIB, description="address space of such a process, MiB")
    allow_hosts: list[str] = Field([])
    """hosts, as they stand in an address, that may have a private address: a wiki of your own; all others must be public"""
    user_agent: str = Field("marsrl", pattern=r"^[\x21-\x7e][\x20-\x7e]*$")
    """what servers are told of who asks"""

    @field_validator("allow_hosts")
    @classmethod
    def _are_hosts(cls, value: list[str]) -> list[str]:
        for host in value:
            if not re.fullmatch(r"[0-9A-Za-z._:-]+", host) or re.fullmatch(r"[^:]+:\d+", host):
                raise ValueError(
                    f"{host!r:.80} is no host; expected a name or an IP address, without scheme, port and path"
                )
        return [host.lower() for host in value]


class OwnTool(ToolLimits):
    """A tool of a user's."""

    deterministic: bool = False
    """the same arguments have the same answer for as long as a run lasts: it may be kept (cache_mib)"""


class FunctionTool(OwnTool):
    """A Python function of a user's; each call in a process beside the run."""

    kind: Literal["function"] = Field(description="function: of a Python file; mcp: of a server that speaks MCP")
    function: str = Field(pattern=r".+\.py:[A-Za-z_]\w*$")
    """FILE.py:FUNCTION, with annotations and a docstring, sync or async"""
    memory_mib: int = Field(4096, ge=256, le=MOST_MIB, description="address space of a call's process, MiB")


class McpServer(OwnTool):
    """Tools of a server that speaks the Model Context Protocol: a command that a run starts, or an address."""

    kind: Literal["mcp"] = Field(description="function: of a Python file; mcp: of a server that speaks MCP")
    command: list[str] | None = Field(None, min_length=1)
    """the server's command and its arguments; it is spoken to by stdin and stdout"""
    url: HttpUrl | None = Field(None, description="http(s)://host[:port]/mcp, a server that speaks streamable HTTP")
    tools: list[str] | None = Field(None, min_length=1, description="the server's tools to use; null: all that it has")
    environment: list[str] = Field([])
    """environment variables, by name, that the command gets beside PATH, HOME and the like"""
    api_key_env: VariableName | None = None
    """environment variable whose value is the url's bearer token; never the token itself"""

    @model_validator(mode="after")
    def _is_one_server(self) -> McpServer:
        if (self.command is None) == (self.url is None):
            raise ValueError("a tool of kind mcp has either a command or a url: give one of them")
        if (self.environment and self.url) or (self.api_key_env and self.command):
            raise ValueError("environment goes with a command, api_key_env with a url: leave the other out")
        return self


TOOL_NAMES = ("search", "scholar", "visit", "python")
"""The tools that ship."""

_OWN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_TAKEN = ("unknown", "pages")  # in metrics: tools that do not exist, and what visit and read_pages read


def how_to_set(name: str) -> str:
    """The setting that gives a run this tool."""
    return f"tools.{name}={{}}" if name in ("visit", "python") else f"tools.{name}.kind"


class ToolsConfig(Settings):
    """The tools that agents can call, by name, and how pages are read for them; any other name is a tool of the user's."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[
        str,
        Annotated[
            FunctionTool | McpServer, Field(discriminator="kind", description="a tool of yours, by your name for it")
        ],
    ] = Field(init=False)

    search: SearchConfig | None = None
    """kind: index (a corpus file), http (a retrieval server) or serpapi"""
    scholar: ScholarConfig | None = Field(None, description="kind: index (a file of papers) or serpapi")
    visit: VisitTool | None = Field(None, description="reads pages of the web; {} takes its defaults")
    python: PythonTool | None = Field(None, description="a sandboxed interpreter (docs/python.md); {}: its defaults")
    pages: PagesConfig = PagesConfig()

    @model_validator(mode="before")
    @classmethod
    def _others_are_own_tools(cls, given: Any) -> Any:
        for name, settings in given.items() if isinstance(given, dict) else ():
            if name in cls.model_fields:
                continue
            kind = settings.get("kind") if isinstance(settings, Mapping) else getattr(settings, "kind", None)
            if kind not in ("function", "mcp"):
                raise ValueError(
                    f"tools.{name} is none of the tools that ship ({', '.join(TOOL_NAMES)}), and no tool of yours, whose kind is "
                    "function or mcp (docs/tools.md)"
                )
            if not _OWN_NAME.fullmatch(str(name)) or name in _TAKEN:
                raise ValueError(f"tools.{name}: expected a name of at most 64 letters, digits and _, and not unknown")
        return given

    @property
    def given(self) -> dict[str, ToolLimits]:
        """Settings of the tools that are set, by name."""
        shipped = {name: getattr(self, name) for name in TOOL_NAMES}
        return {name: each for name, each in shipped.items() if each is not None} | (self.__pydantic_extra__ or {})
