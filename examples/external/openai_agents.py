"""openai-agents: a clerk answers, or hands off to an expert with weights of its own. `pip install openai-agents`"""

from agents import Agent, ModelBehaviorError, OpenAIChatCompletionsModel, RunConfig, Runner, handoff
from agents.extensions.handoff_filters import remove_all_tools
from openai import AsyncOpenAI

OPTIONS = RunConfig(tracing_disabled=True)  # traces would go to api.openai.com


async def run(problem, client):
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as openai:

        def agent(name, **more):
            return Agent(name, model=OpenAIChatCompletionsModel(name, openai), **more)

        to_expert = handoff(agent("expert"), input_filter=remove_all_tools)  # who reads the question alone
        clerk = agent("clerk", instructions="Answer, or hand off what is hard.", handoffs=[to_expert])
        try:
            await Runner.run(clerk, problem.question, run_config=OPTIONS, max_turns=4)
        except ModelBehaviorError:  # a call of a tool that is not there
            return 0
    # Nothing is returned: the task judges the last answer, and all who took part are rewarded for it.
