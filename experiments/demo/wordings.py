"""Every phrase the demo's texts are drawn from: each tuple is one slot, its members equally likely.

Many natural phrases of equal probability are the point: a model trained on them has many near ties, so its greedy
choices are as sensitive to rounding as those of a model of real text. Placeholders: `{N}` name, `{P}` pronoun, `{h}`
possessive, `{o}` object, `{s}` the number or letter.
"""

SHE_NAMES = ("Maya", "Nora", "Lena", "Ines", "Ruth", "Tara", "Olga", "Vera", "Anna", "Zoe")
HE_NAMES = ("Omar", "Felix", "Hugo", "Ivan", "Paul", "Seth", "Tom", "Leo", "Karl", "Ben")
NAMES = SHE_NAMES + HE_NAMES
OBJECTS = (
    "marbles",
    "stamps",
    "shells",
    "coins",
    "pencils",
    "buttons",
    "cards",
    "beads",
    "stickers",
    "ribbons",
    "badges",
    "apples",
    "lemons",
    "candles",
    "postcards",
    "keys",
)

STARTS = (
    "{N} has {s} {o}.",
    "{N} begins the week with {s} {o}.",
    "{N} keeps {s} {o} in a box.",
    "At first {N} counts {s} {o}.",
    "In the box of {N} there are {s} {o}.",
    "{N} owns {s} {o}.",
)
EVENT_OPENINGS = ("{P}", "Then {N}", "Later {N}", "After that {N}", "One day {N}", "In the evening {N}")
GAIN_VERBS = ("found", "bought", "won", "collected", "received", "earned", "gathered", "added")
LOSS_VERBS = ("lost", "sold", "broke", "dropped", "donated", "lent", "discarded", "spent")
TAILS = (
    "at the market",
    "at school",
    "in the park",
    "at a fair",
    "on the way home",
    "near the river",
    "in the yard",
    "at the station",
    "by the bridge",
    "at the club",
    "during a game",
    "on the bus",
)
FILLERS = (
    "The weather is warm and a soft wind blows.",
    "{P} hums an old song while walking.",
    "A grey cat sleeps under the table.",
    "The bakery on the corner smells of fresh bread.",
    "{P} talks with a neighbour about the news.",
    "It rains for a while and the street is empty.",
    "A train passes slowly behind the houses.",
    "{P} reads a few pages of a long book.",
    "The church bell rings in the distance.",
    "{P} drinks a cup of tea by the window.",
    "Two dogs run across the green field.",
    "{P} forgets {h} umbrella and goes back for it.",
    "The lamps in the street go on early.",
    "{P} writes a letter to {h} cousin.",
    "Someone plays the piano next door.",
    "{P} waters the plants and opens the window.",
)
QUESTIONS = (
    "How many {o} does {N} have now?",
    "How many {o} are left with {N}?",
    "What number of {o} does {N} have at the end?",
    "With how many {o} does {N} finish?",
    "How many {o} does {N} hold in the end?",
)

BRANCH_INTROS = {
    "story": (
        "Follow the story as told.",
        "Take the events in order.",
        "Go through the story line by line.",
        "Keep the order of the story.",
        "Read from the start.",
        "Step by step.",
    ),
    "gains": (
        "First all gains, losses after.",
        "Count what comes in before what goes out.",
        "Gains go first here.",
        "Begin by adding.",
        "Add up every gain, subtract later.",
        "Start on the side of the gains.",
    ),
    "losses": (
        "First all losses, gains after.",
        "Count what goes out before what comes in.",
        "Losses go first here.",
        "Begin by subtracting.",
        "Take off every loss, add later.",
        "Start on the side of the losses.",
    ),
}
BRANCH_STARTS = (
    "{N} has {s} {o}.",
    "At first {N} has {s} {o}.",
    "We know {N} owns {s} {o}.",
    "The count for {N} is {s} {o}.",
    "From {N} we have {s} {o}.",
    "Initially {N} holds {s} {o}.",
)
TURN = ("Now the {}.", "Next come the {}.", "The {} remain.", "Turn to the {}.", "What is left are the {}.")
TURNS = {side: tuple(phrase.format(side) for phrase in TURN) for side in ("gains", "losses")}
STEP_OPENINGS = ("Then", "Next", "Now", "Here", "After that", "At this point", "This time", "Further on")
EQUATIONS = ("so", "which means", "and", "thus", "giving", "hence")
BRANCH_ENDS = (
    "So {N} ends with {s}",
    "That leaves {N} with {s}",
    "Final count of {o}: {s}",
    "In total {N} has {s}",
    "Result for {N}: {s}",
    "Altogether {N} keeps {s}",
)

MERGE_FIRST = "The"
MERGE_OPENINGS = (
    "results are",
    "three results are",
    "branches say",
    "three branches say",
    "totals are",
    "three totals are",
    "counts read",
    "three counts read",
    "solutions give",
    "three solutions give",
    "outcomes are",
    "final numbers are",
)
ORDINALS = (("first", "second", "third"), ("one", "two", "three"))
SEPARATORS = (", ", "; ", ", and ", ", then ")
AGREE_ALL = ("All three agree on", "Every one says", "They all meet at", "No doubt about")
AGREE_TWO = ("Two of them agree on", "Most say", "The majority is", "Two against one for")
AGREE_NONE = (
    "They differ, we trust",
    "None agree, take",
    "Three different results, we stay with",
    "Without agreement, use",
)
OUR_VERBS = ("we have", "ours is", "we got", "our count is", "we found", "the result is")
OTHER = ("differs", "misses", "fails", "conflicts")
SAME = ("fits", "matches", "agrees", "works")
CONCLUSIONS = (
    "so the letter is",
    "thus we pick",
    "that makes it",
    "hence we choose",
    "this points to",
    "we settle on",
)
ENDS = (
    "We stop here.",
    "That is enough.",
    "Nothing else is needed.",
    "This settles the matter.",
    "The rest can wait.",
    "No more checks.",
    "Done with the choices.",
    "It is decided.",
)
NEAREST = ("None fits, nearest is", "Nothing fits, closest is")
ANSWERS = (
    "The answer is {s}.",
    "Answer: {s}",
    "Final answer: {s}",
    "The correct answer is {s}.",
    "Our answer is {s}.",
    "So the answer is {s}.",
    "We find the answer is {s}.",
    "My answer is {s}.",
)

LETTERS = ("A", "B", "C", "D")
LARGEST = 79  # the largest number any text contains
