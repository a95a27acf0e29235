"""Real prompts for a chat model. Our own words, free to use."""

# Open questions, whose answers are of very different lengths.
CHAT_PROMPTS = (
    "What is the capital of France?",
    "Explain why the sky is blue to a ten-year-old.",
    "Name three primary colours.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "What is 7 times 8?",
    "Give me a recipe for pancakes, with amounts and steps.",
    "Translate to French: Good morning, my friend.",
    "Compare trains and aeroplanes for a journey of 500 kilometres.",
    "Is water wet? Answer in one word.",
    "Describe how a bicycle stays upright.",
    "List the planets of the solar system in order from the sun.",
    "Write a polite email that asks a colleague to move a meeting from Monday to Tuesday.",
    "What do bees make?",
    "Explain what a database index does and when it does not help.",
    "Who wrote Romeo and Juliet?",
    "Give five tips for someone who is learning to swim as an adult.",
    "What is the opposite of hot?",
    "Summarise the story of the tortoise and the hare.",
    "How many days are in a leap year?",
    "Write a Python function that reverses a string, and explain it.",
    "What sound does a cat make?",
    "Describe the water cycle in a few sentences.",
    "What is the largest ocean?",
    "Suggest a plan for a rainy Sunday with two small children.",
)

_PASSAGE = (
    "The harbour of Lindholm freezes in most winters. From December to March the ferries stop, and the island lives "
    "on what it has stored: dried fish, potatoes, apples in straw, and firewood cut in the autumn. Children walk to "
    "school over the ice, and the post comes by sledge on Tuesdays and Fridays. In April the first ship is met with "
    "a brass band, and everybody gets an orange."
)
_NOTICE = (
    "The workshop opens at eight. Please sign in at the desk and wear safety glasses near the machines. The band saw "
    "may be used only with a second person in the room. Clean your bench before you leave, put every tool back on "
    "its hook, and write down any fault in the red book. The last person switches off the air filter and the lights."
)
_CODE = """def average(values):
    total = 0
    count = 0
    for value in values:
        total = total + value
        count = count + 1
    if count == 0:
        return None
    return total / count


def highest(values):
    best = None
    for value in values:
        if best is None or value > best:
            best = value
    return best
"""
_LETTER = (
    "Dear neighbours, on Saturday the street will be closed from ten in the morning until six in the evening, because "
    "the water pipe under the pavement has to be replaced. Please park your cars in Mill Lane, and keep a few bottles "
    "of water ready, since the taps may run dry for an hour. I am sorry for the noise. Yours sincerely, Martin Hale."
)

# Tasks whose answers repeat much of what was asked.
COPY_PROMPTS = tuple(
    f"{task}\n\n{text}" for text, tasks in (
        (_PASSAGE, ("Repeat the following text word for word.", "Quote this passage in full, and change nothing.")),
        (_NOTICE, ("Copy this notice exactly.", "Write out this notice again, unchanged.")),
        (_CODE, ("Repeat this code exactly.", "Rewrite this code and rename the variable total to amount.")),
        (_LETTER, ("Repeat this letter word for word.", "Quote this letter in full, and change nothing.")),
    ) for task in tasks
)
