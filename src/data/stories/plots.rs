//! The plots: each tells one story, sentence by sentence, drawing words as it goes. What was said early comes back
//! late (names, colours, numbers, who owns what), so that there is something to learn over a distance.

use super::random::StoryRandom;
use super::words::{
    ADVERBS, ANIMALS, Animal, CHILDREN, COLORS, COUNTED, Child, DISHES, ENDINGS, FEELINGS, JOBS,
    MATERIALS, NUMBERS, PET_NAMES, PLACES, Place, RELATIVES, SIZES, TIMES, TOYS, WEATHERS,
};

/// A story in the making.
struct Story<'a> {
    random: &'a mut StoryRandom,
    text: String,
}

impl Story<'_> {
    fn say(&mut self, sentence: &str) {
        if !self.text.is_empty() {
            self.text.push(' ');
        }
        let mut characters = sentence.chars();
        self.text
            .extend(characters.next().map(|first| first.to_ascii_uppercase()));
        self.text.push_str(characters.as_str());
    }

    /// Says one of several sentences.
    fn say_one_of(&mut self, sentences: &[String]) {
        let at = self.random.below(sentences.len());
        self.say(&sentences[at]);
    }

    fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.random.below(list.len())]
    }

    /// Two different entries.
    fn pick_two<T: Copy>(&mut self, list: &[T]) -> (T, T) {
        let first = self.random.below(list.len());
        let step = 1 + self.random.below(list.len() - 1);
        (list[first], list[(first + step) % list.len()])
    }

    /// Now and then, a sentence that the plot could do without: what can be seen, worn, counted, known or felt.
    fn detail(&mut self, child: Child) {
        if !self.random.chance(1, 2) {
            return;
        }
        let Child {
            name,
            she,
            her,
            hers,
        } = child;
        let animal = self.pick(ANIMALS);
        let (a, kind) = (animal.a, animal.kind);
        let (color, other_color) = self.pick_two(COLORS);
        let (toy, thing) = self.pick_two(TOYS);
        let (adverb, feeling, material) = (
            self.pick(ADVERBS),
            self.pick(FEELINGS),
            self.pick(MATERIALS),
        );
        let (size, time, relative) = (self.pick(SIZES), self.pick(TIMES), self.pick(RELATIVES));
        let (count, many) = (NUMBERS[2 + self.random.below(8)], self.pick(COUNTED).1);
        let place = self.pick(PLACES);
        let (the, spot) = (place.the, place.spots[self.random.below(3)]);
        self.say_one_of(&[
            format!("{name} wore a {color} {thing} and felt {feeling}."),
            format!("{a} {} past {her} {adverb}.", animal.moves),
            format!("{hers} {relative} was {feeling}, as always {time}."),
            format!("{she} saw {count} {many} beside a {size} {toy}."),
            format!("The {kind} near {the} {}.", animal.glad),
            format!(
                "Everyone knows that {a} lives {} and eats {}.",
                animal.lives, animal.eats
            ),
            format!(
                "{name} thought of the {toy} of {material} that {hers} {relative} had made {time}."
            ),
            format!("\"I like {color} better than {other_color},\" said {name} {adverb}."),
            format!(
                "A {size} {color} {thing} lay on the ground, and {she} stepped over it {adverb}."
            ),
            format!("{hers} {relative} waved {adverb} from {the}."),
            format!("{time}, {name} is never {feeling}."),
            format!("{she} counted {count} {color} {many} {spot}."),
        ]);
    }

    fn ending(&mut self) {
        let ending = self.pick(ENDINGS);
        self.say(ending);
    }
}

/// Tells one story, on one line and without the line's end.
pub(super) fn tell(random: &mut StoryRandom) -> String {
    const PLOTS: [fn(&mut Story<'_>); 8] = [
        lost_toy,
        hungry_animal,
        cooking,
        counting,
        weather_day,
        job_visit,
        night_noise,
        sharing,
    ];
    let plot = PLOTS[random.below(PLOTS.len())];
    let mut story = Story {
        random,
        text: String::new(),
    };
    plot(&mut story);
    story.text
}

/// "One sunny morning, Mia went to the park." and what the sky was like.
fn set_out(story: &mut Story<'_>, child: Child) -> Place {
    let place = story.pick(PLACES);
    let weather = story.pick(WEATHERS);
    let Child { name, .. } = child;
    let (to, day) = (place.to, weather.day);
    story.say_one_of(&[
        format!("One {day} morning, {name} went {to}."),
        format!("On a {day} day, {name} walked {to}."),
        format!("It was a {day} afternoon, and {name} ran {to}."),
    ]);
    if story.random.chance(1, 2) {
        story.say(weather.sky);
    }
    place
}

fn lost_toy(story: &mut Story<'_>) {
    let child = story.pick(CHILDREN);
    let Child {
        name,
        she,
        her,
        hers,
    } = child;
    let (color, toy) = (story.pick(COLORS), story.pick(TOYS));
    let relative = story.pick(RELATIVES);
    story.say_one_of(&[
        format!("{name} had a {color} {toy}."),
        format!("Once upon a time, {name} had a {color} {toy}."),
        format!("{name} loved {hers} {color} {toy} very much."),
    ]);
    story.say_one_of(&[
        format!("{hers} {relative} gave it to {her}."),
        format!("It was a gift from {hers} {relative}."),
        format!("{hers} {relative} made it for {her}."),
    ]);
    story.detail(child);
    let place = set_out(story, child);
    let the = place.the;
    story.say_one_of(&[
        format!("But when {she} came to {the}, the {toy} was gone."),
        format!("At {the}, {name} could not find the {toy}."),
    ]);
    story.detail(child);
    story.say(&format!("{name} was very sad."));
    let first = story.random.below(3);
    let second = (first + 1 + story.random.below(2)) % 3;
    let (looked, found) = (place.spots[first], place.spots[second]);
    story.say_one_of(&[
        format!("{she} looked {looked}, but it was not there."),
        format!(
            "First {she} looked {looked}, but {she} found only {}.",
            ["dust", "a leaf", "an old shoe"][first]
        ),
    ]);
    let pet = story.pick(ANIMALS);
    let Animal {
        a,
        kind,
        eats,
        glad,
        moves,
        ..
    } = pet;
    story.say_one_of(&[
        format!("Then {a} {moves} up to {her}."),
        format!("Then {she} met {a}."),
    ]);
    story.detail(child);
    story.say_one_of(&[
        format!("The {kind} saw the {color} {toy} {found}."),
        format!("The {kind} helped {her} to look, and there was the {color} {toy}, {found}!"),
    ]);
    story.detail(child);
    story.say_one_of(&[
        format!("\"Thank you,\" said {name}, and gave the {kind} {eats}."),
        format!("{name} was so happy that {she} gave the {kind} {eats}."),
    ]);
    story.say(&format!("The {kind} {glad}."));
    if story.random.chance(1, 2) {
        story.say(&format!(
            "{name} took the {toy} home and showed it to {hers} {relative}."
        ));
    } else {
        story.ending();
    }
}

fn hungry_animal(story: &mut Story<'_>) {
    let child = story.pick(CHILDREN);
    let Child {
        name,
        she,
        her,
        hers,
    } = child;
    let place = set_out(story, child);
    let (size, color) = (story.pick(SIZES), story.pick(COLORS));
    let Animal {
        kind,
        eats,
        lives,
        glad,
        moves,
        ..
    } = story.pick(ANIMALS);
    let spot = place.spots[story.random.below(3)];
    story.say_one_of(&[
        format!("There {she} saw a {size} {color} {kind} {spot}."),
        format!("{she} found a {size} {color} {kind} {spot}."),
    ]);
    let feeling = story.pick(&["hungry", "tired", "lost", "cold"]);
    story.say_one_of(&[
        format!("The {kind} looked {feeling}."),
        format!("The {kind} was {feeling} and did not move."),
        format!("\"Why are you so sad?\" asked {name}. \"I am {feeling},\" said the {kind}."),
    ]);
    story.detail(child);
    match feeling {
        "hungry" => story.say(&format!(
            "So {name} gave it {eats}, and the {kind} ate it all."
        )),
        "tired" => story.say(&format!(
            "So {name} let it sleep in {hers} arms until it woke up."
        )),
        "lost" => story.say(&format!("So {name} took it back to its home {lives}.")),
        _ => story.say(&format!(
            "So {name} put {hers} coat around it to keep it warm."
        )),
    }
    story.say(&format!("The {kind} {glad}."));
    let pet = story.pick(PET_NAMES);
    if story.random.chance(1, 2) {
        story.say(&format!("{name} called it {pet}."));
        story.say_one_of(&[
            format!("Every day, {pet} {moves} {} to see {her}.", place.to),
            format!(
                "When {name} came back {}, {pet} was {} again.",
                place.to, spot
            ),
            format!("Now {pet} is not {feeling} any more."),
        ]);
    } else {
        story.say(&format!("Then it {moves} away, because it lived {lives}."));
    }
    story.ending();
}

fn cooking(story: &mut Story<'_>) {
    let (child, friend) = story.pick_two(CHILDREN);
    let Child {
        name, she, hers, ..
    } = child;
    let dish = story.pick(DISHES);
    let relative = story.pick(RELATIVES);
    let what = dish.name;
    story.say_one_of(&[
        format!("{name} wanted to make {what} for {hers} {relative}."),
        format!("It was the birthday of {name}'s {relative}, and {name} wanted to make {what}."),
        format!("\"Today I will make {what},\" said {name} to {hers} {relative}."),
    ]);
    let missing = story.random.below(3);
    let (one, two) = (dish.needs[(missing + 1) % 3], dish.needs[(missing + 2) % 3]);
    let lacks = dish.needs[missing];
    story.say_one_of(&[
        format!("{she} took {one} and {two}, but {she} had no {lacks}."),
        format!("For {what} {she} needed {one}, {two} and {lacks}. But {she} had no {lacks}."),
    ]);
    story.detail(child);
    let Child {
        name: other,
        she: other_she,
        ..
    } = friend;
    story.say_one_of(&[
        format!("So {name} went to {other} and asked for {lacks}."),
        format!("So {name} asked {other}, \"Do you have some {lacks}?\""),
    ]);
    story.detail(child);
    story.say_one_of(&[
        format!("\"Yes,\" said {other}, and {other_she} gave {name} the {lacks}."),
        format!("{other} had no {lacks}, so they went together to the market and bought some."),
    ]);
    story.say_one_of(&[
        format!("{name} {} the {what}, and {other} helped.", dish.made),
        format!("Then {name} and {other} {} the {what} together.", dish.made),
    ]);
    story.detail(child);
    story.say_one_of(&[
        format!("It was {} and very good.", dish.tastes),
        format!("The {what} tasted {}.", dish.tastes),
    ]);
    story.detail(child);
    story.say_one_of(&[
        format!("{hers} {relative} ate it all and said, \"Thank you, {name} and {other}!\""),
        format!("{name}'s {relative} was very happy."),
    ]);
    if story.random.chance(1, 2) {
        story.ending();
    }
}

fn counting(story: &mut Story<'_>) {
    let (child, friend) = story.pick_two(CHILDREN);
    let Child {
        name,
        she,
        her,
        hers,
    } = child;
    let (one, many) = story.pick(COUNTED);
    let noun = |count: usize| if count == 1 { one } else { many };
    let had = 3 + story.random.below(7);
    story.say_one_of(&[
        format!("{name} had {} {many} in {hers} basket.", NUMBERS[had]),
        format!("One day, {name} found {} {many}.", NUMBERS[had]),
    ]);
    let gave = 1 + story.random.below(2);
    let other = friend.name;
    story.say_one_of(&[
        format!("{she} gave {} {} to {other}.", NUMBERS[gave], noun(gave)),
        format!(
            "{other} asked for {} {}, and {name} said yes.",
            NUMBERS[gave],
            noun(gave)
        ),
    ]);
    story.detail(child);
    let left = had - gave;
    story.say(&format!("Now {name} had {} {}.", NUMBERS[left], noun(left)));
    let Animal {
        a,
        kind,
        glad,
        moves,
        ..
    } = story.pick(ANIMALS);
    story.say_one_of(&[
        format!("Then {a} {moves} by and took one."),
        format!("On the way home, {she} met {a} and gave it one."),
    ]);
    story.detail(child);
    let left = left - 1;
    story.say(&format!(
        "The {kind} {glad}, and {name} had {} {}.",
        NUMBERS[left],
        noun(left)
    ));
    let relative = story.pick(RELATIVES);
    if left > 0 && story.random.chance(2, 3) {
        story.say_one_of(&[
            format!(
                "At home, {she} put the {} {} on the table.",
                NUMBERS[left],
                noun(left)
            ),
            format!(
                "{she} showed the {} {} to {hers} {relative}.",
                NUMBERS[left],
                noun(left)
            ),
        ]);
        story.say(&format!("\"It is good to share,\" said {hers} {relative}."));
    } else {
        let (color, toy) = (story.pick(COLORS), story.pick(TOYS));
        story.say(&format!(
            "{other} gave {her} a {color} {toy} and said, \"This is for you, {name}.\""
        ));
    }
    story.ending();
}

fn weather_day(story: &mut Story<'_>) {
    let (child, friend) = story.pick_two(CHILDREN);
    let Child {
        name, she, hers, ..
    } = child;
    let other = friend.name;
    let weather = story.pick(WEATHERS);
    let day = weather.day;
    story.say_one_of(&[
        format!("It was a {day} day."),
        format!("One {day} morning, {name} looked out of the window."),
    ]);
    story.say(weather.sky);
    let relative = story.pick(RELATIVES);
    story.say_one_of(&[
        format!(
            "\"Do not go out without {},\" said {name}'s {relative}.",
            weather.needs
        ),
        format!(
            "{hers} {relative} gave {name} {}, because it was {day}.",
            weather.needs
        ),
    ]);
    story.detail(child);
    let place = story.pick(PLACES);
    let play = weather.play;
    story.say_one_of(&[
        format!("{name} and {other} went {} to {play}.", place.to),
        format!(
            "{name} met {other} near {}, and they began to {play}.",
            place.the
        ),
    ]);
    story.detail(child);
    if story.random.chance(1, 2) {
        let spot = place.spots[story.random.below(3)];
        let (color, toy) = (story.pick(COLORS), story.pick(TOYS));
        story.say(&format!("{spot}, {other} found a {color} {toy}."));
        story.say_one_of(&[
            format!("\"Is this your {toy}?\" asked {other}. \"No, my {toy} is not {color},\" said {name}."),
            format!("They gave the {color} {toy} to {hers} {relative}."),
        ]);
    } else {
        let Animal {
            a,
            kind,
            moves,
            lives,
            ..
        } = story.pick(ANIMALS);
        story.say(&format!(
            "They saw {a} that {moves} home, because it was so {day}."
        ));
        story.say(&format!("The {kind} lived {lives}."));
    }
    story.say_one_of(&[
        format!(
            "When it got dark, {she} went home and told {hers} {relative} about the {day} day."
        ),
        format!("{name} and {other} were tired but happy."),
    ]);
    if story.random.chance(1, 2) {
        story.ending();
    }
}

fn job_visit(story: &mut Story<'_>) {
    let child = story.pick(CHILDREN);
    let Child {
        name,
        she,
        her,
        hers,
    } = child;
    let relative = story.pick(RELATIVES);
    let (job, at, tool, does) = story.pick(JOBS);
    story.say_one_of(&[
        format!("{name}'s {relative} was a {job}."),
        format!("Once upon a time, {name} wanted to be a {job}, like {hers} {relative}."),
    ]);
    story.say_one_of(&[
        format!("A {job} works in {at} and {does}."),
        format!("Every morning, the {job} went to {at} with {tool}."),
    ]);
    story.detail(child);
    story.say_one_of(&[
        format!("One day, {name} went to {at} to help."),
        format!(
            "\"May I come to {at} with you?\" asked {name}. \"Of course,\" said {hers} {relative}."
        ),
    ]);
    story.detail(child);
    story.say_one_of(&[
        format!("There {she} saw {tool}, and now {she} knew that a {job} {does}."),
        format!("The {job} needed {tool}, and {name} brought it."),
    ]);
    let (color, toy) = (story.pick(COLORS), story.pick(TOYS));
    if story.random.chance(1, 2) {
        story.say(&format!(
            "In the evening, the {job} gave {her} a {color} {toy}."
        ));
        story.say(&format!("{name} was proud of the {color} {toy}."));
    } else {
        let dream = story.pick(JOBS).0;
        story.say(&format!(
            "\"When I am big, I will be a {dream},\" said {name}."
        ));
        if dream == job {
            story.say(&format!(
                "{hers} {relative} smiled, because {she} would be a good {job}."
            ));
        } else {
            story.say(&format!(
                "{hers} {relative} laughed, because a {dream} is not a {job}."
            ));
        }
    }
    story.ending();
}

fn night_noise(story: &mut Story<'_>) {
    let child = story.pick(CHILDREN);
    let Child {
        name,
        she,
        her,
        hers,
    } = child;
    let relative = story.pick(RELATIVES);
    let spot = story.pick(&[
        "under the bed",
        "in the attic",
        "in the cellar",
        "outside the window",
        "behind the door",
    ]);
    story.say_one_of(&[
        format!("One night, {name} heard a noise {spot}."),
        format!("It was late, and {name} could not sleep, because there was a noise {spot}."),
    ]);
    story.say_one_of(&[
        format!("{she} was afraid and called {hers} {relative}."),
        format!("\"What is that?\" {she} asked {hers} {relative}."),
    ]);
    story.detail(child);
    let lamp = story.pick(&["a lamp", "a candle"]);
    story.say(&format!(
        "{hers} {relative} came with {lamp}, and they looked {spot}."
    ));
    let Animal {
        a,
        kind,
        eats,
        lives,
        glad,
        moves,
    } = story.pick(ANIMALS);
    story.say_one_of(&[
        format!("It was only {a}!"),
        format!("There sat {a} and looked at {her}."),
    ]);
    story.detail(child);
    story.say_one_of(&[
        format!("The {kind} wanted {eats}."),
        format!("\"It should be at home {lives},\" said {name}."),
    ]);
    story.say_one_of(&[
        format!("{name} gave it {eats}, and the {kind} {glad}."),
        format!("The {kind} {glad} and {moves} away."),
    ]);
    story.detail(child);
    story.say_one_of(&[
        format!("After that, {name} was not afraid any more."),
        format!("Then {name} and {hers} {relative} went back to bed."),
    ]);
    story.detail(child);
    if story.random.chance(1, 2) {
        story.ending();
    }
}

fn sharing(story: &mut Story<'_>) {
    let (child, friend) = story.pick_two(CHILDREN);
    let Child {
        name,
        she,
        her,
        hers,
    } = child;
    let Child {
        name: other,
        she: other_she,
        her: other_her,
        ..
    } = friend;
    let (color, second) = story.pick_two(COLORS);
    let (toy, wish) = story.pick_two(TOYS);
    story.say_one_of(&[
        format!("{name} had a {color} {toy}, and {other} had a {second} {wish}."),
        format!("{name} and {other} were friends. {name} had a {color} {toy}. {other} had a {second} {wish}."),
    ]);
    story.say_one_of(&[
        format!("{name} wanted to play with the {wish}, but {other} said no."),
        format!("\"May I have your {wish}?\" asked {name}. \"No,\" said {other}, \"it is mine.\""),
    ]);
    story.detail(child);
    let place = story.pick(PLACES);
    story.say_one_of(&[
        format!("{name} was angry and went {} alone.", place.to),
        format!(
            "So {name} went {} with {hers} {toy} and played alone.",
            place.to
        ),
    ]);
    story.detail(child);
    let spot = place.spots[story.random.below(3)];
    story.say(&format!("{she} sat down {spot} and was not happy."));
    let relative = story.pick(RELATIVES);
    story.say_one_of(&[
        format!(
            "Then {hers} {relative} said to {her}, \"Give {other} your {color} {toy} for a while.\""
        ),
        format!(
            "After a while, {other} came to {} and said, \"I am sorry.\"",
            place.the
        ),
    ]);
    story.say_one_of(&[
        format!(
            "{name} gave {other} the {color} {toy}, and {other} gave {her} the {second} {wish}."
        ),
        format!(
            "So {other} played with the {color} {toy}, and {name} played with the {second} {wish}."
        ),
    ]);
    story.detail(child);
    story.say_one_of(&[
        format!("{other_she} thanked {her}, and {she} thanked {other_her}."),
        format!("\"It is good to share,\" said {other}."),
    ]);
    story.detail(child);
    story.ending();
}
