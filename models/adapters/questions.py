"""Questions for two small adapters: short ones with answers for training, and others to see how an adapter answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Example(NamedTuple):
    """A question. sentence: the answer as a sentence. answer: the same in a few words."""

    question: str
    sentence: str
    answer: str


CAPITALS = """France Paris, Germany Berlin, Italy Rome, Spain Madrid, Greece Athens, Austria Vienna, Poland Warsaw,
Japan Tokyo, China Beijing, Egypt Cairo, Kenya Nairobi, Peru Lima, Chile Santiago, Cuba Havana, Canada Ottawa, Russia
Moscow, Turkey Ankara, Sweden Stockholm, Finland Helsinki, Denmark Copenhagen, Ireland Dublin, Hungary Budapest,
Belgium Brussels, Iran Tehran"""
OPPOSITES = """hot cold, big small, fast slow, up down, day night, good bad, old new, rich poor, light dark, open
closed, loud quiet, wet dry, high low, hard soft, full empty, happy sad, strong weak, near far, left right, true
false, clean dirty, long short"""
PLURALS = """mouse mice, foot feet, tooth teeth, child children, man men, city cities, leaf leaves, knife knives,
goose geese, box boxes, baby babies, dog dogs, church churches, hero heroes, ox oxen, sheep sheep, person people, key
keys"""
COLORS = """grass green, snow white, coal black, blood red, gold yellow, milk white, chocolate brown, mud brown, moss
green, ash gray"""
YOUNG = """dog puppy, cat kitten, cow calf, horse foal, bear cub, duck duckling, frog tadpole, goat kid, pig piglet,
deer fawn"""
DAYS = "Monday Tuesday, Tuesday Wednesday, Wednesday Thursday, Friday Saturday, Saturday Sunday, Sunday Monday"
PAIRS = {
    "What is the capital of {}?": ("The capital of {} is {}.", CAPITALS),
    "What is the opposite of {}?": ("The opposite of {} is {}.", OPPOSITES),
    "What is the plural of {}?": ("The plural of {} is {}.", PLURALS),
    "What color is {}?": ("The color of {} is {}.", COLORS),
    "What is a young {} called?": ("A young {} is called a {}.", YOUNG),
    "What day comes after {}?": ("The day after {} is {}.", DAYS),
}
SENTENCES = {
    "Write one sentence about the sea.": "The sea is wide and deep, and its waves never rest.",
    "Write one sentence about dogs.": "Dogs are loyal animals that love to play with people.",
    "Write one sentence about rain.": "Rain falls from the clouds and lets the plants grow.",
    "Write one sentence about music.": "Music can make people dance, laugh or cry.",
    "Write one sentence about books.": "Books take their readers to places far away.",
    "Write one sentence about the sun.": "The sun rises in the east and warms the earth.",
    "Why do birds fly?": "Birds fly to find food and to escape from danger.",
    "Why do we sleep?": "We sleep because the body and the brain need rest.",
    "Why is ice cold?": "Ice is cold because water freezes at zero degrees.",
    "Why do leaves fall?": "Leaves fall in autumn because trees save water for the winter.",
    "Who wrote Faust?": "Faust was written by Goethe.",
    "Who painted the Mona Lisa?": "The Mona Lisa was painted by Leonardo da Vinci.",
    "Who invented the telephone?": "The telephone was invented by Alexander Graham Bell.",
    "How many days are in a week?": "A week has seven days.",
    "How many months are in a year?": "A year has twelve months.",
    "How many legs does a cat have?": "A cat has four legs.",
    "Name three fruits.": "Three fruits are apples, pears and plums.",
    "Name three metals.": "Three metals are iron, copper and gold.",
    "Name three colors.": "Three colors are red, blue and yellow.",
    "Name a planet.": "Mars is a planet.",
    "Name a river in Europe.": "The Danube is a river in Europe.",
    "Tell me a fact about cats.": "Cats sleep for more than half of the day.",
    "Tell me a fact about trees.": "Some trees are more than a thousand years old.",
    "Tell me about the moon.": "The moon moves around the earth in about a month.",
    "Tell me about bread.": "Bread is baked from flour, water, salt and yeast.",
    "What is a hammer?": "A hammer is a tool that drives nails into wood.",
    "What is a library?": "A library is a place where people borrow books.",
    "What is snow?": "Snow is frozen water that falls from the clouds.",
    "What do cows eat?": "Cows eat grass and hay.",
    "What do doctors do?": "Doctors help sick people to become healthy again.",
    "Where do fish live?": "Fish live in rivers, lakes and the sea.",
    "When do people eat breakfast?": "People eat breakfast in the morning.",
    "Good morning!": "Good morning, how can I help you?",
    "How are you?": "I am fine, thank you.",
    "What is your name?": "My name is SmolLM.",
    "Can you help me?": "Yes, I can help you.",
    "Who are you?": "I am SmolLM, a small language model.",
    "Who wrote Don Quixote?": "Don Quixote was written by Cervantes.",
    "Who discovered America?": "America was discovered by Columbus.",
    "Why is grass green?": "Grass is green because of the chlorophyll in it.",
    "Where do camels live?": "Camels live in the desert.",
    "Where do monkeys live?": "Monkeys live in the trees of the rain forest.",
    "Where is Berlin?": "Berlin is in Germany.",
    "What do horses eat?": "Horses eat grass, oats and apples.",
    "What do teachers do?": "Teachers help children to learn.",
    "What is a car?": "A car is a vehicle with four wheels and an engine.",
    "What is a spoon?": "A spoon is a tool to eat soup with.",
    "How many wheels does a car have?": "A car has four wheels.",
    "Tell me a fact about elephants.": "Elephants are the largest animals on land.",
    "Tell me a fact about ants.": "Ants can carry many times their own weight.",
    "Tell me a fact about dolphins.": "Dolphins are mammals and breathe air.",
    "Name three animals.": "Three animals are dogs, cats and horses.",
    "Name three drinks.": "Three drinks are water, milk and tea.",
    "Name a tree.": "The oak is a tree.",
    "Name a sport.": "Football is a sport.",
    "Give me a name for a dog.": "Rex is a good name for a dog.",
    "Give me a name for a boat.": "Neptune is a good name for a boat.",
    "Write one sentence about summer.": "Summer is warm, and the days are long.",
    "Write one sentence about trains.": "Trains carry people and goods on rails.",
}

HELD_OUT = (
    "What is the capital of Portugal?",
    "What is the capital of Norway?",
    "What is the opposite of early?",
    "What is the plural of wolf?",
    "What color is a lemon?",
    "What is a young sheep called?",
    "What day comes after Thursday?",
    "How much is two plus nine?",
    "Write one sentence about winter.",
    "Why is the sky blue?",
    "Who wrote Hamlet?",
    "How many legs does a spider have?",
    "Name three vegetables.",
    "Name a musical instrument.",
    "Tell me a fact about bees.",
    "What is a bicycle?",
    "What do lions eat?",
    "Where do penguins live?",
    "Give me a name for a cat.",
    "Hello, who are you?",
)
"""No adapter was trained with one of these."""


def training_examples() -> Iterator[Example]:
    """Yield some 200 questions, kind by kind."""
    for question, (sentence, pairs) in PAIRS.items():
        for pair in pairs.split(","):
            subject, answer = pair.split()
            yield Example(question.format(subject), sentence.format(subject, answer), answer)
    numbers = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
    for left in range(1, 7):
        for right in range(left, 7):
            one, other, total = (numbers[number - 1] for number in (left, right, left + right))
            yield Example(f"How much is {one} plus {other}?", f"{one.capitalize()} plus {other} is {total}.", total)
    for question, sentence in SENTENCES.items():
        yield Example(question, sentence, sentence)
