"""LangGraph: a Solver, and a Verifier that can make the Solver try again. `pip install langgraph langchain-openai`"""

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

TRIES = 2


class State(MessagesState):
    """messages: the Solver's chat. reports: the Verifier's reports."""

    reports: list


async def run(problem, client):
    def model(agent):
        return ChatOpenAI(model=agent, base_url=client.base_url, api_key=client.api_key, max_tokens=40)

    solver, verifier = model("solver"), model("verifier")

    async def solve(state):
        return {"messages": await solver.ainvoke(state["messages"])}

    async def verify(state):
        shown = f"{problem.question} \n {state['messages'][-1].text}"
        report = await verifier.ainvoke([("system", "grade"), ("user", shown)])
        return {"reports": [*state["reports"], report], "messages": ("user", f"{report.text} fix")}

    def after(state):
        return END if approves(state["reports"][-1]) or len(state["reports"]) == TRIES else "solve"

    graph = StateGraph(State)
    graph.add_node("solve", solve)
    graph.add_node("verify", verify)
    graph.add_edge(START, "solve")
    graph.add_edge("solve", "verify")
    graph.add_conditional_edges("verify", after)
    state = await graph.compile().ainvoke({"messages": [("user", problem.question)], "reports": []})

    rights = [is_right(each.text, problem) for each in state["messages"] if each.type == "ai"]
    rewards = {"solver": rights[-1]}
    for report, right in zip(state["reports"], rights):
        rewards[report.response_metadata["id"]] = approves(report) == right  # the reward of this call alone
    return rewards


def approves(report):
    return report.text.endswith("correct")


def is_right(solution, problem):
    return solution.rpartition("Answer:")[2].strip() == problem.answer
