"""Small invented facts to hide in real text: a question that only the hidden sentence answers."""

import random
import re

_NAMES = """
Alma Boris Chiara Dmitri Elena Farid Greta Hugo Ines Jonas Kenji Lucia Marek Nadia Omar Petra Quentin Rosa
Sven Tara Ulla Viktor Wanda Yusuf Zoe
""".split()
_SURNAMES = """
Abbot Bergman Castillo Dorsey Ekholm Farrow Grimaldi Hashimoto Iversen Jankovic Keller Lindqvist Moreau Novak
Okafor Petrov Quimby Rossi Sandoval Takeda Unger Varga Whitlock Yilmaz Zeman
""".split()
_ADJECTIVES = """
amber brass copper crimson dusty emerald faded golden hollow ivory jagged narrow oaken pale quiet rusty
scarlet silver tangled velvet wooden yellow
""".split()
_OBJECTS = """
archive barn bridge cabinet canoe cellar chapel clock compass drawer engine ferry garden harbour kettle
lantern ledger library locker mill orchard piano quarry safe tower trunk vault violin wagon windmill
""".split()
_CITIES = """
Aarhus Bergen Cadiz Debrecen Esch Fez Ghent Haifa Izmir Jena Kyoto Lima Malaga Nantes Oslo Porto Quito Riga
Seville Tartu Utrecht Varna Wroclaw York Zadar
""".split()
_JOBS = """
architect baker botanist carpenter chemist dentist editor geologist jeweller librarian locksmith mason nurse
painter pilot plumber sculptor surveyor tailor translator
""".split()
_FOODS = """
apricots barley beetroot cardamom chestnuts figs ginger hazelnuts lentils mulberries olives parsnips plums
quinces radishes rhubarb saffron turnips walnuts
""".split()
_SERIALS = 0.35  # share of the facts: long random values are lost first, because all of their tokens must be kept
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


def make_fact(rng: random.Random) -> tuple[str, str, str]:
    """Invent a fact, as (sentence, question, answer)."""
    person = f"{rng.choice(_NAMES)} {rng.choice(_SURNAMES)}"
    item = f"the {rng.choice(_ADJECTIVES)} {rng.choice(_OBJECTS)}"
    # Numbers of three to five digits, sometimes up to ten; serials are groups of hexadecimal digits.
    digits = 0 if rng.random() < 0.6 else rng.randint(6, 10)
    number = str(rng.randint(10 ** (digits - 1), 10**digits - 1) if digits else rng.randint(100, 99999))
    code = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ23456789") for _ in range(rng.choice([4, 5, 6, 7, 12, 16])))
    sizes = rng.choice([*[(8, 4, 4, 4, 12)] * 4, (4, 4, 4, 4), (6, 8), (16,), (5, 5, 5, 5), (32,)])
    serial = "-".join("".join(rng.choice("0123456789abcdef") for _ in range(size)) for size in sizes)
    city, job, food = rng.choice(_CITIES), rng.choice(_JOBS), rng.choice(_FOODS)
    variable = f"{code[:7].lower()}_{job}"
    year = str(rng.randint(1650, 2020))
    the_item = item.capitalize()
    serials = [
        (f"The serial number of {item} reads {serial}.", f"What is the serial number of {item}?", serial),
        (f"{person} signed in with the token {serial}.", f"With which token did {person} sign in?", serial),
        (f"The checksum stored for {variable} is {serial}.", f"What is the checksum of {variable}?", serial),
        (
            f"The file about {item} has the identifier {serial}.",
            f"What is the identifier of the file about {item}?",
            serial,
        ),
    ]
    if rng.random() < _SERIALS:
        return rng.choice(serials)
    facts = [
        (f"The number painted on {item} is {number}.", f"What number is painted on {item}?", number),
        (f"The password for {item} is {code}.", f"What is the password for {item}?", code),
        (f"{person} works as a {job} in {city}.", f"In which city does {person} work as a {job}?", city),
        (f"By trade, {person} was a {job}.", f"What was the trade of {person}?", job),
        (f"{person} was born in {city} in {year}.", f"In which year was {person} born?", year),
        (f"{the_item} was bought by {person} for {number} crowns.", f"Who bought {item}?", person),
        (f"{the_item} was sold for {number} crowns.", f"For how many crowns was {item} sold?", number),
        (f"There are {number} sacks of {food} in {item}.", f"How many sacks are in {item}?", number),
        (f"{person} keeps the {food} in {item}.", f"Where does {person} keep the {food}?", f"in {item}"),
        (f"Remember that the key to {item} hangs in {city}.", f"Where does the key to {item} hang?", f"in {city}"),
        (f"Note: the value of {variable} is {number}.", f"What is the value of {variable}?", number),
        (f"The telephone extension of {person} is {number}.", f"What is the extension of {person}?", number),
    ]
    return rng.choice(facts)


def insert_sentences(rng: random.Random, text: str, sentences: list[str]) -> str:
    """Insert each sentence at a random sentence boundary of `text`."""
    parts = [part for part in _SENTENCE_END.split(text) if part]
    for sentence in sentences:
        parts.insert(rng.randint(0, len(parts)), sentence)
    return " ".join(parts)
