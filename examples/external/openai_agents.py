"""openai-agents: a clerk answers, or hands off to an expert with weights of its own. `pip install openai-agents`"""

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner
from openai import AsyncOpenAI

OPTIONS = RunConfig(tracing_disabled=True)  # traces would go to api.openai.com


async def run(problem, client):
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as openai:

        def agent(name, instructions, **more):
            return Agent(name, instructions=instructions, model=OpenAIChatCompletionsModel(name, openai), **more)

        expert = agent("expert", "Solve the problem step by step. End with \\boxed{answer}.")
        clerk = agent("clerk", "Hand a hard problem off. Else solve it. End with \\boxed{answer}.", handoffs=[expert])
        await Runner.run(clerk, problem.question, run_config=OPTIONS, max_turns=4)
    # Nothing is returned: the task judges the last answer, and all who took part are rewarded for it.
