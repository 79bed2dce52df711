"""openai-agents: a clerk answers, or hands off to an expert with its own weights. `pip install openai-agents`"""

from agents import Agent, ModelBehaviorError, OpenAIChatCompletionsModel, RunConfig, Runner, handoff
from agents.extensions.handoff_filters import remove_all_tools
from openai import AsyncOpenAI

OPTIONS = RunConfig(tracing_disabled=True)  # otherwise traces would go to api.openai.com


async def run(problem, client):
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as openai:

        def agent(name, **more):
            return Agent(name, model=OpenAIChatCompletionsModel(name, openai), **more)

        to_expert = handoff(agent("expert"), input_filter=remove_all_tools)  # the expert reads only the question
        clerk = agent("clerk", instructions="Answer, or hand off what is hard.", handoffs=[to_expert])
        try:
            await Runner.run(clerk, problem.question, run_config=OPTIONS, max_turns=4)
        except ModelBehaviorError:  # the model called a tool that does not exist
            return 0
    # Nothing is returned, so the task judges the last answer and rewards every agent that took part.
