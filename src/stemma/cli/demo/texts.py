"""Texts of the demo, written for Stemma, under the same licence."""

from __future__ import annotations

Messages = list[dict[str, str]]

HANDBOOK = """\
Opening hours. The reading room opens at nine in the morning from Monday to Saturday and closes at \
eight in the evening. On Sunday it opens at noon and closes at six. The map room is open in the \
afternoon only, since its keeper also looks after the tide tables. On the first Monday of each month \
the whole house stays closed: the clocks are wound, the lamps are cleaned and the catalogue is \
checked against the shelves.
Cards. A card costs nothing for people who live in the city or on one of the ships that winter here. \
Everybody else pays four coins a year. A lost card is replaced once without a charge; after that a \
new one costs one coin. Children under twelve use the card of a parent, but they may choose their \
books themselves, and nobody is to tell them that a book is too difficult.
Borrowing. Up to six books can be borrowed at a time, for four weeks. A book that nobody else is \
waiting for may be kept for another four weeks. Charts, logbooks and anything printed before the \
great storm do not leave the house. Whoever brings a book back late pays nothing, but has to tell \
the desk how it ended.
Quiet. Speaking is allowed in the hall, whispering in the reading room, and neither in the map room, \
where the dust of two hundred years lies on paper that is thinner than a leaf. The cat is allowed \
everywhere.
Questions. If a visitor asks for something that is not in this handbook, say so and name the desk \
where they can ask: the round desk for books, the long desk for maps, the small desk by the door for \
lost umbrellas.
"""

HANDBOOK_QUESTIONS = (
    "At what time does the reading room open?",
    "What does a card cost for people who don't live in the city?",
)

KEEPER = "You are the keeper of a lighthouse. Answer in one sentence."
KEEPER_QUESTIONS = ("Which ship passed last night?", "When is the lamp lit?")

DIALOGUE = ("What is photosynthesis? Answer in one sentence.", "Which gas do plants need for it?")

REPEATED_QUESTION = "List the twelve months of the year."

EXAMPLES: tuple[tuple[str, str, str], ...] = (
    (
        "A baker makes 4 trays of 12 rolls and sells 30 of them. How many are left?",
        "4 x 12 = 48; 48 - 30 = 18",
        "18",
    ),
    (
        "A train has 9 wagons with 40 seats each. 275 seats are taken. How many are free?",
        "360 - 275 = 85",
        "85",
    ),
    ("Ines reads 15 pages a day. How many days does a book of 240 pages take?", "240 / 15 = 16", "16"),
    ("A garden is 8 m long and 5 m wide. How long is the fence around it?", "2 x (8 + 5) = 26", "26"),
    (
        "Omar has 60 coins, gives a third to his sister and spends 14. How many are left?",
        "60 - 20 - 14 = 26",
        "26",
    ),
    ("A shelf holds 7 books of 3 cm and 4 of 5 cm. How wide are they together?", "21 + 20 = 41", "41"),
    (
        "Two taps fill a tank of 90 litres, 4 and 5 litres a minute. How long does it take?",
        "90 / 9 = 10",
        "10",
    ),
    (
        "A bus leaves every 25 minutes, the first at 6:00. When does the fourth leave?",
        "3 x 25 = 75 minutes",
        "7:15",
    ),
)

QUESTIONS = (
    "A farmer packs 84 eggs in boxes of 6. How many boxes are full?",
    "A rope of 45 m is cut into pieces of 5 m. How many cuts are needed?",
    "Mila saves 7 coins a week. How much has she after 13 weeks?",
    "A hall has 18 rows of 22 chairs; 51 chairs are broken. How many can be used?",
    "A lamp burns 6 hours a night. How many hours does it burn in February?",
    "Three friends share 51 plums. How many does each get?",
    "A boat goes 14 km in an hour. How far does it go in 3 and a half hours?",
    "A stack of 30 plates is 75 cm high. How thick is one plate?",
    "A ticket costs 12 coins, half for children. What do 2 adults and 3 children pay?",
    "A clock strikes once at one, twice at two, and so on. How often from one to six?",
    "A printer makes 16 pages a minute. How long do 200 pages take?",
    "A square has an area of 144. How long is its side?",
    "Noor walks 850 m to school and back, five days a week. How far is that?",
    "A box of 2 kg holds 25 nails of 40 g and some screws. What do the screws weigh?",
    "A river rises 8 cm a day for 6 days, then falls 11 cm. How far has it risen?",
    "A baker needs 350 g of flour a loaf. How many loaves do 7 kg give?",
)


def few_shot_prefix() -> str:
    """Return the worked examples that all few-shot prompts share."""
    return "".join(
        f"Question: {question}\nAnswer: {steps}. The answer is {result}.\n\n"
        for question, steps, result in EXAMPLES
    )


def about_handbook(question: str) -> Messages:
    """Return a conversation that asks about the handbook."""
    content = f"{HANDBOOK}\n\nAnswer in one short sentence: {question}"
    return [{"role": "user", "content": content}]


def to_keeper(question: str) -> Messages:
    """Return a conversation with the keeper of the lighthouse."""
    return [{"role": "system", "content": KEEPER}, {"role": "user", "content": question}]


def few_shot(question: str) -> str:
    """Return a prompt of worked examples and a question."""
    return f"{few_shot_prefix()}Question: {question}\nAnswer:"


def dialogue(*turns: str) -> str:
    """Return a conversation as ChatML text, ready for the next answer: question, answer, question, ..."""
    roles = ("user", "assistant")
    texts = (f"<|im_start|>{roles[number % 2]}\n{turn}<|im_end|>\n" for number, turn in enumerate(turns))
    return "".join(texts) + "<|im_start|>assistant\n"
