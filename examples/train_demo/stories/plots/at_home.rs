//! Plots that happen at home and at work: cooking, counting, a job, a noise at night.

use super::super::words::{
    ANIMALS, Animal, CHILDREN, COLORS, COUNTED, Child, DISHES, JOBS, NUMBERS, RELATIVES, TOYS,
};
use super::story::Story;

pub(super) fn cooking(story: &mut Story<'_>) {
    let (child, friend) = story.pick_two(CHILDREN);
    let Child { name, she, hers, .. } = child;
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
    let Child { name: other, she: other_she, .. } = friend;
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

pub(super) fn counting(story: &mut Story<'_>) {
    let (child, friend) = story.pick_two(CHILDREN);
    let Child { name, she, her, hers } = child;
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
        format!("{other} asked for {} {}, and {name} said yes.", NUMBERS[gave], noun(gave)),
    ]);
    story.detail(child);
    let left = had - gave;
    story.say(&format!("Now {name} had {} {}.", NUMBERS[left], noun(left)));
    let Animal { a, kind, glad, moves, .. } = story.pick(ANIMALS);
    story.say_one_of(&[
        format!("Then {a} {moves} by and took one."),
        format!("On the way home, {she} met {a} and gave it one."),
    ]);
    story.detail(child);
    let left = left - 1;
    story.say(&format!("The {kind} {glad}, and {name} had {} {}.", NUMBERS[left], noun(left)));
    let relative = story.pick(RELATIVES);
    if left > 0 && story.random.chance(2, 3) {
        story.say_one_of(&[
            format!("At home, {she} put the {} {} on the table.", NUMBERS[left], noun(left)),
            format!("{she} showed the {} {} to {hers} {relative}.", NUMBERS[left], noun(left)),
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

pub(super) fn job_visit(story: &mut Story<'_>) {
    let child = story.pick(CHILDREN);
    let Child { name, she, her, hers } = child;
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
        story.say(&format!("In the evening, the {job} gave {her} a {color} {toy}."));
        story.say(&format!("{name} was proud of the {color} {toy}."));
    } else {
        let dream = story.pick(JOBS).0;
        story.say(&format!("\"When I am big, I will be a {dream},\" said {name}."));
        if dream == job {
            story.say(&format!("{hers} {relative} smiled, because {she} would be a good {job}."));
        } else {
            story.say(&format!("{hers} {relative} laughed, because a {dream} is not a {job}."));
        }
    }
    story.ending();
}

pub(super) fn night_noise(story: &mut Story<'_>) {
    let child = story.pick(CHILDREN);
    let Child { name, she, her, hers } = child;
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
    story.say(&format!("{hers} {relative} came with {lamp}, and they looked {spot}."));
    let Animal { a, kind, eats, lives, glad, moves } = story.pick(ANIMALS);
    story.say_one_of(&[format!("It was only {a}!"), format!("There sat {a} and looked at {her}.")]);
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
