"""Needles that share no word with their question: what joins them is knowledge of the world.

    needle    {name} grew up beneath the Eiffel Tower.
    question  Which person has lived in France?

A needle names one person, and the question asks for the person. No needle answers another's
question, so the other pairs are distractors. Persons of the haystack's own could fit a question
too: none of the built-in novel's fits one of these. The sentences are our own; the idea is
NoLiMa's (Modarressi et al. 2025, arXiv:2502.05167), whose texts are not free for every use.
"""

# (needle, question); a test holds them to what is said above.
RIDDLES = [
    ("{name} grew up beneath the Eiffel Tower.", "Which person has lived in France?"),
    ("{name} works as a guide at the Colosseum.", "Which person has been to Italy?"),
    ("{name} proposed marriage in front of the Taj Mahal.", "Which person has visited India?"),
    ("{name} sketched the Great Sphinx at sunrise.", "Which person has travelled to Egypt?"),
    ("{name} fainted on the steps of the Kremlin.", "Which person has stayed in Russia?"),
    ("{name} photographed Mount Fuji every morning.", "Which person has been to Japan?"),
    ("{name} sold postcards at Machu Picchu.", "Which person knows Peru at first hand?"),
    ("{name} leaned against the Brandenburg Gate.", "Which person was seen in Germany?"),
    ("{name} sang at the opera house in Sydney.", "Which person has gone to Australia?"),
    ("{name} polished the steps of the Parthenon.", "Which person has reached Greece?"),
    ("{name} camped below Table Mountain.", "Which person has explored South Africa?"),
    ("{name} never eats anything that came from an animal.", "Which person is a vegan?"),
    ("{name} breaks out in a rash after a single peanut.", "Which person has an allergy?"),
    ("{name} cannot tell red from green.", "Which person is colour-blind?"),
    ("{name} reads with the fingertips alone.", "Which person lost the sense of sight?"),
    ("{name} follows every talk by watching lips.", "Which person is deaf?"),
    ("{name} spends the nights charting Saturn and its rings.", "Which person loves astronomy?"),
    ("{name} keeps forty hives behind the barn.", "Which person has bees?"),
    ("{name} pulls rotten molars all day long.", "Which person is a dentist?"),
    ("{name} argues before the judge in a black robe.", "Which person is a lawyer?"),
    ("{name} kneads dough long before dawn.", "Which person bakes bread?"),
    ("{name} checkmated three opponents at once.", "Which person is good at chess?"),
    ("{name} was dealt two aces and bluffed anyway.", "Which person enjoys poker?"),
    ("{name} tuned the strings and rosined the bow.", "Which person plays the violin?"),
    ("{name} crossed the finish after forty-two kilometres.", "Which person ran a marathon?"),
    ("{name} refuses to fly and takes trains instead.", "Which person is afraid of aeroplanes?"),
    ("{name} went home from the ceremony with an Oscar.", "Which person makes films?"),
]
