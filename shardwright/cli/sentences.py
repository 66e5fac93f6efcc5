"""The demo's sentences: sixteen pairs, each saying one thing in two ways."""

PAIRS = (
    ("The cat is asleep on the sofa.", "A kitten naps on the couch."),
    ("It has been raining since the morning.", "The wet weather started at dawn and goes on."),
    ("She plays the violin in an orchestra.", "He is a musician with a string quartet."),
    ("The train to Busan leaves at nine.", "Our railway journey begins at 9 o'clock."),
    ("Bread rises because of yeast.", "Fermentation makes the dough grow."),
    ("The stock market fell sharply today.", "Shares lost much of their value this afternoon."),
    ("How do I reset my password?", "I forgot my login and want to set a new one."),
    ("The telescope found a distant galaxy.", "Astronomers saw stars far beyond the Milky Way."),
    ("The team won the final by one goal.", "A single strike decided the football championship."),
    ("Vaccines train the immune system.", "Immunisation teaches the body to fight infection."),
    ("The bridge was closed for repairs.", "Engineers shut the crossing to fix it."),
    (
        "Gradient descent minimises the loss.",
        "The optimiser lowers the training error in steps.",
    ),
    ("The judge postponed the trial.", "The court case was put off to a later date."),
    ("Bees carry pollen from flower to flower.", "Insects pollinate the blossoms in the garden."),
    ("My phone's battery is empty.", "The smartphone needs charging."),
    ("The volcano erupted during the night.", "Lava poured out of the mountain after dark."),
)
