//! Plots that happen outside: something is lost, found, shared, or blown about.

use super::super::words::{
    ANIMALS, Animal, CHILDREN, COLORS, Child, PET_NAMES, PLACES, Place, RELATIVES, SIZES, TOYS,
    WEATHERS,
};
use super::story::Story;

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

pub(super) fn lost_toy(story: &mut Story<'_>) {
    let child = story.pick(CHILDREN);
    let Child { name, she, her, hers } = child;
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
    let Animal { a, kind, eats, glad, moves, .. } = pet;
    story.say_one_of(&[format!("Then {a} {moves} up to {her}."), format!("Then {she} met {a}.")]);
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
        story.say(&format!("{name} took the {toy} home and showed it to {hers} {relative}."));
    } else {
        story.ending();
    }
}

pub(super) fn hungry_animal(story: &mut Story<'_>) {
    let child = story.pick(CHILDREN);
    let Child { name, she, her, hers } = child;
    let place = set_out(story, child);
    let (size, color) = (story.pick(SIZES), story.pick(COLORS));
    let Animal { kind, eats, lives, glad, moves, .. } = story.pick(ANIMALS);
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
        "hungry" => story.say(&format!("So {name} gave it {eats}, and the {kind} ate it all.")),
        "tired" => story.say(&format!("So {name} let it sleep in {hers} arms until it woke up.")),
        "lost" => story.say(&format!("So {name} took it back to its home {lives}.")),
        _ => story.say(&format!("So {name} put {hers} coat around it to keep it warm.")),
    }
    story.say(&format!("The {kind} {glad}."));
    let pet = story.pick(PET_NAMES);
    if story.random.chance(1, 2) {
        story.say(&format!("{name} called it {pet}."));
        story.say_one_of(&[
            format!("Every day, {pet} {moves} {} to see {her}.", place.to),
            format!("When {name} came back {}, {pet} was {} again.", place.to, spot),
            format!("Now {pet} is not {feeling} any more."),
        ]);
    } else {
        story.say(&format!("Then it {moves} away, because it lived {lives}."));
    }
    story.ending();
}

pub(super) fn weather_day(story: &mut Story<'_>) {
    let (child, friend) = story.pick_two(CHILDREN);
    let Child { name, she, hers, .. } = child;
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
        format!("\"Do not go out without {},\" said {name}'s {relative}.", weather.needs),
        format!("{hers} {relative} gave {name} {}, because it was {day}.", weather.needs),
    ]);
    story.detail(child);
    let place = story.pick(PLACES);
    let play = weather.play;
    story.say_one_of(&[
        format!("{name} and {other} went {} to {play}.", place.to),
        format!("{name} met {other} near {}, and they began to {play}.", place.the),
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
        let Animal { a, kind, moves, lives, .. } = story.pick(ANIMALS);
        story.say(&format!("They saw {a} that {moves} home, because it was so {day}."));
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

pub(super) fn sharing(story: &mut Story<'_>) {
    let (child, friend) = story.pick_two(CHILDREN);
    let Child { name, she, her, hers } = child;
    let Child { name: other, she: other_she, her: other_her, .. } = friend;
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
        format!("So {name} went {} with {hers} {toy} and played alone.", place.to),
    ]);
    story.detail(child);
    let spot = place.spots[story.random.below(3)];
    story.say(&format!("{she} sat down {spot} and was not happy."));
    let relative = story.pick(RELATIVES);
    story.say_one_of(&[
        format!(
            "Then {hers} {relative} said to {her}, \"Give {other} your {color} {toy} for a while.\""
        ),
        format!("After a while, {other} came to {} and said, \"I am sorry.\"", place.the),
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
