//! The words of the stories, and the facts that tie them together: what an animal eats, what a dish is made of, what
//! each kind of weather asks for. A model has to keep these facts in its weights, and pruning loses them. Tables are one
//! row a line.

/// A child: the name, and the pronouns that go with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Child {
    pub(super) name: &'static str,
    /// "she" or "he".
    pub(super) she: &'static str,
    /// "her" or "him".
    pub(super) her: &'static str,
    /// "her" or "his".
    pub(super) hers: &'static str,
}

const fn girl(name: &'static str) -> Child {
    Child { name, she: "she", her: "her", hers: "her" }
}

const fn boy(name: &'static str) -> Child {
    Child { name, she: "he", her: "him", hers: "his" }
}

#[rustfmt::skip]
pub(super) const CHILDREN: &[Child] = &[
    girl("Mia"), boy("Ben"), girl("Lucy"), boy("Tom"), girl("Anna"), boy("Sam"),
    girl("Rosa"), boy("Max"), girl("Ella"), boy("Leo"), girl("Nina"), boy("Jack"),
    girl("Clara"), boy("Finn"), girl("Ivy"), boy("Oscar"), girl("Maya"), boy("Hugo"),
    girl("Zoe"), boy("Paul"), girl("Emma"), boy("Noah"), girl("Sofia"), boy("Peter"),
    girl("Nora"), boy("Adam"), girl("Julia"), boy("Felix"),
];

/// An animal and what is true of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Animal {
    /// With its article: "a rabbit".
    pub(super) a: &'static str,
    /// "rabbit".
    pub(super) kind: &'static str,
    pub(super) eats: &'static str,
    pub(super) lives: &'static str,
    /// What it does when it is glad.
    pub(super) glad: &'static str,
    /// How it moves: "hopped".
    pub(super) moves: &'static str,
}

const fn animal(
    a: &'static str,
    kind: &'static str,
    eats: &'static str,
    lives: &'static str,
    glad: &'static str,
    moves: &'static str,
) -> Animal {
    Animal { a, kind, eats, lives, glad, moves }
}

#[rustfmt::skip]
pub(super) const ANIMALS: &[Animal] = &[
    animal("a dog", "dog", "a bone", "in a wooden house", "wagged its tail", "ran"),
    animal("a cat", "cat", "some fish", "on a soft pillow", "purred", "crept"),
    animal("a rabbit", "rabbit", "a carrot", "under the hill", "wiggled its nose", "hopped"),
    animal("a bird", "bird", "some seeds", "in a nest", "sang a song", "flew"),
    animal("a duck", "duck", "some bread", "by the pond", "quacked", "waddled"),
    animal("a mouse", "mouse", "some cheese", "behind the wall", "squeaked", "ran"),
    animal("a horse", "horse", "an apple", "in the stable", "shook its head", "trotted"),
    animal("a frog", "frog", "a fly", "in the reeds", "croaked", "jumped"),
    animal("a bear", "bear", "some honey", "in a cave", "clapped its paws", "walked"),
    animal("an owl", "owl", "a beetle", "in an old oak", "hooted", "flew"),
    animal("a goat", "goat", "some grass", "on the mountain", "stamped its feet", "jumped"),
    animal("a squirrel", "squirrel", "a nut", "in a hollow tree", "flicked its tail", "climbed"),
    animal("a hen", "hen", "some corn", "in the barn", "clucked", "walked"),
    animal("a monkey", "monkey", "a banana", "in the tall trees", "danced", "climbed"),
    animal("a turtle", "turtle", "a leaf", "near the river", "nodded slowly", "crawled"),
    animal("a sheep", "sheep", "some hay", "on the green meadow", "lifted its head", "walked"),
    animal("a pig", "pig", "some turnips", "in the mud", "grunted", "trotted"),
    animal("a hedgehog", "hedgehog", "a worm", "under a pile of wood", "rolled into a ball", "crawled"),
    animal("a swan", "swan", "some reeds", "on the quiet lake", "spread its wings", "swam"),
    animal("a fox", "fox", "some berries", "in a den", "rolled on the ground", "crept"),
];

/// A dish: what it is, and the three things it is made of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dish {
    pub(super) name: &'static str,
    pub(super) needs: [&'static str; 3],
    /// How it is made: "baked".
    pub(super) made: &'static str,
    /// How it tastes.
    pub(super) tastes: &'static str,
}

const fn dish(
    name: &'static str,
    needs: [&'static str; 3],
    made: &'static str,
    tastes: &'static str,
) -> Dish {
    Dish { name, needs, made, tastes }
}

#[rustfmt::skip]
pub(super) const DISHES: &[Dish] = &[
    dish("cake", ["flour", "eggs", "sugar"], "baked", "sweet"),
    dish("soup", ["potatoes", "onions", "salt"], "cooked", "warm"),
    dish("bread", ["flour", "water", "yeast"], "baked", "fresh"),
    dish("salad", ["tomatoes", "beans", "oil"], "mixed", "crisp"),
    dish("pie", ["apples", "butter", "cinnamon"], "baked", "sweet"),
    dish("pancakes", ["milk", "eggs", "honey"], "fried", "soft"),
    dish("lemonade", ["lemons", "water", "ice"], "mixed", "sour"),
    dish("jam", ["strawberries", "sugar", "lemons"], "cooked", "sweet"),
    dish("pudding", ["milk", "vanilla", "sugar"], "cooked", "soft"),
    dish("porridge", ["oats", "milk", "raisins"], "cooked", "warm"),
    dish("pizza", ["flour", "cheese", "tomatoes"], "baked", "spicy"),
    dish("stew", ["carrots", "meat", "pepper"], "cooked", "rich"),
];

/// Weather: how a day of it is called, what happens, what one needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Weather {
    /// "rainy".
    pub(super) day: &'static str,
    /// A sentence about the sky.
    pub(super) sky: &'static str,
    pub(super) needs: &'static str,
    /// What one does outside.
    pub(super) play: &'static str,
}

const fn weather(
    day: &'static str,
    sky: &'static str,
    needs: &'static str,
    play: &'static str,
) -> Weather {
    Weather { day, sky, needs, play }
}

#[rustfmt::skip]
pub(super) const WEATHERS: &[Weather] = &[
    weather("sunny", "The sun was bright and warm.", "a hat", "play ball"),
    weather("rainy", "The rain fell on the roof.", "an umbrella", "jump in the puddles"),
    weather("windy", "The wind blew through the trees.", "a scarf", "fly a kite"),
    weather("snowy", "The snow was white and deep.", "warm boots", "build a snowman"),
    weather("foggy", "The fog was thick and gray.", "a lamp", "look for the path"),
    weather("hot", "The air was hot and still.", "some water", "swim in the river"),
    weather("frosty", "There was ice on the windows.", "thick gloves", "skate on the ice"),
    weather("cloudy", "The clouds hung low in the sky.", "a coat", "ride a bike"),
];

/// A place: with its preposition, alone, and three spots where things can lie.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// "to the park".
    pub(super) to: &'static str,
    /// "the park".
    pub(super) the: &'static str,
    pub(super) spots: [&'static str; 3],
}

const fn place(to: &'static str, the: &'static str, spots: [&'static str; 3]) -> Place {
    Place { to, the, spots }
}

#[rustfmt::skip]
pub(super) const PLACES: &[Place] = &[
    place("to the park", "the park", ["under the bench", "behind the swing", "near the fountain"]),
    place("to the garden", "the garden", ["between the roses", "under the bush", "beside the fence"]),
    place("to the forest", "the forest", ["behind a big rock", "under the leaves", "inside a hollow log"]),
    place("to the beach", "the beach", ["in the sand", "under a shell", "behind the boat"]),
    place("to the farm", "the farm", ["in the hay", "behind the barn", "next to the tractor"]),
    place("to school", "the school", ["under the desk", "on the shelf", "behind the door"]),
    place("to the market", "the market", ["under the table", "beside the flowers", "in a basket"]),
    place("to the lake", "the lake", ["on the dock", "in the tall grass", "beside the bridge"]),
    place("to the library", "the library", ["between two books", "under the lamp", "on the stairs"]),
    place("to the castle", "the castle", ["behind the tower", "under the gate", "on the wall"]),
    place("to the station", "the station", ["beside the clock", "under the train", "on the platform"]),
    place("to the mill", "the mill", ["behind the wheel", "among the sacks", "near the stream"]),
    place("to the harbor", "the harbor", ["under a net", "behind the ship", "beside the anchor"]),
    place("to the hill", "the hill", ["behind the windmill", "under the old tree", "next to the well"]),
];

pub(super) const COLORS: &[&str] = &[
    "red", "blue", "green", "yellow", "white", "brown", "purple", "pink", "black", "gray",
    "silver", "golden",
];

/// Things a child can carry.
pub(super) const TOYS: &[&str] = &[
    "ball", "kite", "hat", "book", "drum", "cup", "ring", "doll", "boat", "whistle", "scarf",
    "key", "box", "train", "bell", "puppet", "flute", "spoon", "ribbon", "mirror", "blanket",
    "lantern", "wagon", "coat", "glove", "plate", "basket", "pencil", "rope", "stamp", "shirt",
    "violin",
];

/// Things that can be counted, and lose one at a time.
pub(super) const COUNTED: &[(&str, &str)] = &[
    ("apple", "apples"),
    ("shell", "shells"),
    ("button", "buttons"),
    ("cookie", "cookies"),
    ("stone", "stones"),
    ("flower", "flowers"),
    ("coin", "coins"),
    ("plum", "plums"),
];

pub(super) const NUMBERS: &[&str] =
    &["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"];

pub(super) const RELATIVES: &[&str] =
    &["mother", "father", "grandmother", "grandfather", "aunt", "uncle", "sister", "brother"];

/// Jobs: who, where this person works, with what, doing what.
#[rustfmt::skip]
pub(super) const JOBS: &[(&str, &str, &str, &str)] = &[
    ("baker", "the bakery", "a rolling pin", "makes bread for everyone"),
    ("farmer", "the field", "a plow", "grows the wheat"),
    ("doctor", "the hospital", "a small bag", "helps sick people"),
    ("teacher", "the classroom", "a piece of chalk", "teaches children to read"),
    ("fisherman", "the harbor", "a net", "catches fish at dawn"),
    ("painter", "the studio", "a brush", "paints the walls"),
    ("tailor", "the shop", "a needle", "sews shirts and coats"),
    ("carpenter", "the workshop", "a hammer", "builds tables and chairs"),
];

pub(super) const SIZES: &[&str] = &["little", "big", "small", "tiny", "huge", "round"];

pub(super) const PET_NAMES: &[&str] =
    &["Pip", "Coco", "Daisy", "Biscuit", "Shadow", "Luna", "Pepper", "Sunny", "Bubbles", "Ginger"];

/// How a story that ends well ends.
pub(super) const ENDINGS: &[&str] = &[
    "It was the best day of all.",
    "They all laughed and went home together.",
    "That night, everyone slept well.",
    "From then on, they were the best of friends.",
    "And they never forgot that day.",
];

/// How something is done.
pub(super) const ADVERBS: &[&str] = &[
    "slowly",
    "quickly",
    "quietly",
    "happily",
    "carefully",
    "suddenly",
    "gently",
    "proudly",
    "softly",
    "bravely",
];

/// How someone feels.
pub(super) const FEELINGS: &[&str] = &[
    "happy",
    "tired",
    "curious",
    "proud",
    "hungry",
    "excited",
    "calm",
    "sleepy",
    "surprised",
    "cheerful",
];

/// What things are made of.
pub(super) const MATERIALS: &[&str] =
    &["wood", "paper", "glass", "gold", "wool", "stone", "silk", "iron", "clay", "leather"];

/// When something happens.
pub(super) const TIMES: &[&str] = &[
    "in the morning",
    "at noon",
    "in the evening",
    "on Monday",
    "on Friday",
    "on Sunday",
    "in spring",
    "in summer",
    "in autumn",
    "in winter",
    "after lunch",
    "before dinner",
];
