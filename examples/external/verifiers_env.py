"""verifiers: the agent `solver` plays an environment of this library, chosen by its id. `pip install verifiers==0.4.0`"""

import os
import random

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.utils.loaders import load_environment, load_taskset

__all__ = ["Chat"]
ID = os.environ.get("VERIFIERS_ID", "chains")  # the default is chains.py, beside this file
TASKS = list(load_taskset(vf.TasksetConfig(id=ID)))


class Chat(vf.Harness[vf.HarnessConfig]):
    """Harness that requests answers in this process; the harnesses of verifiers start a program for each turn."""

    APPENDS_SYSTEM_PROMPT, SUPPORTS_RESUME, EXECUTES_CODE, NEEDS_CONTAINER = True, True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(each) for each in prompt]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def run(problem, client):
    """Play one session. The problem's id selects the task, so all sessions of a problem have the same task.

    Every tenth task is for evaluation.
    """
    own = [task for i, task in enumerate(TASKS) if (i % 10 == 0) == (problem.purpose != "train")]
    task = random.Random(problem.id).choice(own)
    seat = {"harness": {"id": "verifiers_env"}, "runtime": {"type": "subprocess"}}  # for harnesses that start programs
    env = load_environment(vf.SingleAgentEnvConfig.model_validate({"taskset": {"id": ID}, "agent": seat}))
    variable = f"KEY_OF_{client.session}"
    os.environ[variable] = client.api_key  # verifiers reads keys only from the environment
    endpoint = vf.EvalClientConfig(base_url=client.base_url, api_key_var=variable)
    try:
        async with env.serving():
            (slot,) = env.slots(task)
            episode = await env.run_slot(slot, vf.ModelContext("solver", endpoint))
    finally:
        del os.environ[variable]
    if not episode.ok:
        raise RuntimeError([*episode.errors, *(trace.errors for trace in episode.traces)])
    return episode.traces[0].reward
